"""A run's evaluations: every set on the weights of one step, into the run folder and onto the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from actors.generator.generator_pool import Fleet
from service.config import Config
from service.evaluation.sets import Evaluation, table
from service.run.folder import RunFolder

LOOK_SECONDS = 0.5
"""Seconds between two looks whether the run was stopped."""


class Evaluations:
    """Evaluates while training waits."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        folder: RunFolder,
        files: Mapping[str, Path],
        say: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._folder = folder
        self._files = files
        self._say = say
        self._is_stopped = is_stopped

    async def at(self, step: int) -> dict[str, float]:
        """Evaluate every set, unless the run is stopped; the numbers for the step's line of `metrics.jsonl`."""
        start = time.monotonic()
        found: list[Evaluation] = []
        for name, path in self._files.items():
            evaluation = await self._unless_stopped(name, path)
            found += [evaluation] if evaluation is not None else []
        if found:
            self._folder.append_evaluations(step, [evaluation.record() for evaluation in found])
            self._say(f"evaluation after step {step}:")
            for line in table(found).splitlines():
                self._say(f"  {line}")
        numbers = {key: value for evaluation in found for key, value in evaluation.metrics().items()}
        return {**numbers, "timing/eval": time.monotonic() - start}

    async def _unless_stopped(self, name: str, path: Path) -> Evaluation | None:
        evaluating = asyncio.ensure_future(self._fleet.evaluate(name, path, self._config.data.eval_samples))
        while not evaluating.done():
            if self._is_stopped():
                evaluating.cancel()
                return None
            await asyncio.wait([evaluating], timeout=LOOK_SECONDS)
        return evaluating.result()
