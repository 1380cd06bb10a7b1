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

    def are_due(self, step: int) -> bool:
        """Every `data.eval_every` steps, and after the last one if the engines get its weights."""
        every, sync_every = self.config.data.eval_every, self.config.weights.sync_every
        is_last = step == self.config.run.max_steps and step % sync_every == 0
        return every > 0 and (step % every == 0 or is_last)

    async def at(self, step: int) -> dict[str, float]:
        """Evaluate every set unless the run is stopped; returns the metrics for the step's line of `metrics.jsonl`.

        A sample of `data.eval_rows` rows of each set; after the last step all rows.
        """
        start = time.monotonic()
        data, is_last = self.config.data, step == self.config.run.max_steps
        rows = None if is_last else data.eval_rows
        results: list[Evaluation] = []
        for name, path in self.files.items():
            evaluating = asyncio.ensure_future(self.generator_pool.evaluate(name, path, data.eval_samples, rows))
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
