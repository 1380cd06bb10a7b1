"""The quick start's environment, whose steps take longer on demand."""

from __future__ import annotations

import os
import time
from pathlib import Path

from examples.lookup import Lookup, demonstrations, rows, vocabulary
from service.rollout.environment import StepResult

__all__ = ["SlowLookup", "demonstrations", "rows", "vocabulary"]


class SlowLookup(Lookup):
    """Sleeps before each step for as long as the file `environment` in the folder `BATON_SLOW` states."""

    def step(self, text: str) -> StepResult:
        """As in `Lookup`, later."""
        file = Path(os.environ["BATON_SLOW"], "environment")
        if file.exists():
            time.sleep(float(file.read_text()))
        return super().step(text)
