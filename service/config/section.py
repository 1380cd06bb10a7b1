"""The base class and the field types of the configuration's sections."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MOST = 10**15
"""Largest value of an integer setting, so that every number type to which settings are converted can represent it."""
LARGEST_HOST = 1 << 45
"""Upper bound of settings in bytes: more bytes than the memory of any host."""
Positive = Annotated[int, Field(gt=0, le=MOST)]
Count = Annotated[int, Field(gt=0, le=1 << 20)]
"""A number of processes, groups or samples; bounded, because each of them takes memory."""
Versions = Annotated[int, Field(ge=0, le=1 << 20)]
NotNegative = Annotated[int, Field(ge=0, le=MOST)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A duration in seconds. The limit is thirty years, because longer durations overflow the operating system's timers."""
Fraction = Annotated[float, Field(ge=0, le=1)]
MergeMode = Literal["off", "linear", "tree"]
NAME, URL = r"^[a-z][a-z0-9_]{0,31}$", r"^https?://[^/:\s]"
FOLDER_NAME, HOST = r"^[A-Za-z0-9][A-Za-z0-9._-]*$", r"^[0-9A-Za-z:._%-]+$"
FAILURE, SCORE = r"^([1-9][0-9]{0,2}|[A-Za-z_][A-Za-z0-9_]*)$", r"^eval/.+/avg_score$"
PATTERNS = {
    NAME: "be lower-case letters, digits and _, a letter first, 32 at most",
    URL: "begin with http:// or https://",
    FOLDER_NAME: "be letters, digits and . _ -, a letter or a digit first, because it names a folder",
    HOST: "be the name or the address of a host",
    FAILURE: "be an exit code other than 0, or the name of an exception's class",
    SCORE: "be the score of an evaluation set, such as eval/made/avg_score",
}
"""For each pattern: the words with which an error message describes a text that matches."""
Name = Annotated[str, Field(pattern=NAME)]


def _ordered(ends: tuple[float, float], apart: bool) -> tuple[float, float]:
    if ends[0] > ends[1] or (apart and ends[0] == ends[1]):
        raise ValueError("must be two different numbers, the lower one first")
    return ends


Range = Annotated[tuple[Fraction, Fraction], AfterValidator(partial(_ordered, apart=False))]
Band = Annotated[
    tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]], AfterValidator(partial(_ordered, apart=True))
]


def _from_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError("must begin with the home folder of a user of this machine") from error


UserPath = Annotated[Path, AfterValidator(_from_home)]
"""A path that may begin with `~` for the home folder."""


HUB = "hf:"
"""Prefix of addresses on a model hub; such an address can take the place of the path of a model or a dataset."""


class Named(NamedTuple):
    """A mark in the type of a path setting; it says what the path names. Such paths are checked before a run starts."""

    what: str
    kind: Literal["file", "folder", "file or folder"] = "file"
    hint: str = "give a text file"
    holds_model: bool = False


Dataset = Annotated[UserPath, Named("dataset", "file or folder", "give a JSONL or parquet file, or a folder of them")]
KeyFile = Annotated[UserPath, Named("key")]
MODEL_FOLDER = Named("model folder", "folder", "give a Hugging Face folder", holds_model=True)
ModelFolder = Annotated[UserPath, MODEL_FOLDER]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base class of the sections of the configuration: unknown keys are refused, and values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_numbers(cls, value: object, info: ValidationInfo) -> object:
        kinds = str(cls.model_fields[info.field_name or ""].annotation)
        is_number = re.search(r"\b(int|float)\b", kinds) and not re.search(r"\bbool\b", kinds)
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        if is_number and any(isinstance(part, bool) for part in parts):
            raise ValueError("must be a number" if parts == [value] else "must have numbers only")
        return value
