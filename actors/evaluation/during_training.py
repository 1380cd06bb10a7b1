"""The evaluations of a run: every set on the weights of one step, written to the run folder and the terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.generator.generator_pool import GeneratorPool
from service.config import Config
from service.evaluation.report import table
from service.evaluation.scores import Evaluation
from service.run.writer import RunWriter

STOP_CHECK_SECONDS = 0.5
"""Seconds between two checks whether the run was stopped."""


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Evaluates on the run's generators while training waits."""

    config: Config
    generator_pool: GeneratorPool
    folder: RunWriter
    files: Mapping[str, Path]
    """Set -> its rows."""
    say: Callable[[str], None]
    is_stopped: Callable[[], bool]

    async def at(self, step: int) -> dict[str, float]:
        """Evaluate every set unless the run is stopped; returns the metrics for the step's line of `metrics.jsonl`."""
        start = time.monotonic()
        results: list[Evaluation] = []
        for name, path in self.files.items():
            evaluating = asyncio.ensure_future(self.generator_pool.evaluate(name, path, self.config.data.eval_samples))
            while not evaluating.done() and not self.is_stopped():
                await asyncio.wait([evaluating], timeout=STOP_CHECK_SECONDS)
            if not evaluating.done():
                evaluating.cancel()
            elif (evaluation := evaluating.result()) is not None:
                results.append(evaluation)
        if results:
            self.folder.append_evaluations(step, [evaluation.record() for evaluation in results])
            self.say(f"evaluation after step {step}:")
            for line in table(results).splitlines():
                self.say(f"  {line}")
        metrics = {key: value for evaluation in results for key, value in evaluation.metrics().items()}
        return {**metrics, "timing/eval": time.monotonic() - start}
