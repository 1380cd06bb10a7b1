"""What a check of the configuration yields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from service.config.tree import Config


class Problem(NamedTuple):
    """A combination of settings that is refused."""

    path: str
    """The setting to change."""
    message: str
    """The consequence of leaving the setting as it is, and what to do."""


Rule = Callable[[Config], Iterator[Problem]]
"""A check of one subject."""
