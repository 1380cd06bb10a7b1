"""What the parts of the configuration tree have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
MergeMode = Literal["off", "linear", "tree"]
Decay = Annotated[float, Field(ge=0, lt=1)]

if TYPE_CHECKING:
    from service.config.tree import Config


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class Problem(NamedTuple):
    """A combination of settings that is refused."""

    path: str
    """The setting to change."""
    message: str
    """The consequence of leaving the setting as it is, and what to do."""


Rule = Callable[["Config"], Iterator[Problem]]
"""A check of one subject."""
