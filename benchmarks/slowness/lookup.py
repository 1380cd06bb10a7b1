"""The quick start's environment, whose steps take longer on demand."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from baton.examples import lookup
from baton.examples.lookup import Lookup, demonstrations, vocabulary
from service.rollout.environment import StepResult

__all__ = ["SlowLookup", "demonstrations", "rows", "vocabulary"]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """The quick start's rows, for the configured environment."""
    return [row | {"env_class": ""} for row in lookup.rows(n, seed)]


class SlowLookup(Lookup):
    """Waits before each step for as long as the file `environment` in the folder `BATON_SLOW` states."""

    async def step(self, text: str) -> StepResult:
        """Wait, then answer as `Lookup` does."""
        file = Path(os.environ["BATON_SLOW"], "environment")
        if file.exists():
            await asyncio.sleep(float(file.read_text()))
        return await super().step(text)
