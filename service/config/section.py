"""The base class and the field types of the configuration's sections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""At most thirty years: clocks and timers of the operating system overflow beyond."""
Fraction = Annotated[float, Field(ge=0, le=1)]
MergeMode = Literal["off", "linear", "tree"]
NAME, URL = r"^[a-z][a-z0-9_]{0,31}$", r"^https?://"
PATTERNS = {
    NAME: "be lower-case letters, digits and _, a letter first, 32 at most",
    URL: "begin with http:// or https://",
}
"""What a text must be or do, for an error."""
Name = Annotated[str, Field(pattern=NAME)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A section of the configuration: refuses unknown keys, is frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
