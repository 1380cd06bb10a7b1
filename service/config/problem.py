"""A combination of settings that is refused."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    """A combination of settings that is refused."""

    path: str
    """The setting to change."""
    message: str
    """The consequence of leaving the setting as it is, and what to do."""
