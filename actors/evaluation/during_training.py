"""The evaluations of a run. An evaluation plays every evaluation set with the weights of one step; its results are
written to the run folder and the terminal. Training waits until all engines have evaluated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.calls import ACTOR_FAILED, in_a_line
from actors.evaluation.evaluator import evaluate_on
from actors.generator.generator_pool import GeneratorPool
from service.config import DataConfig, RunConfig
from service.evaluation.scores import Evaluation, table
from service.run.folder import EVALUATIONS, read_lines
from service.run.records.writer import RunWriter

STOP_CHECK_SECONDS = 0.5
"""Seconds between two checks whether the run was stopped."""


class Evaluations:
    """Evaluates on the run's generators while training waits."""

    def __init__(
        self,
        data: DataConfig,
        run: RunConfig,
        sync_every: int,
        generator_pool: GeneratorPool,
        folder: RunWriter,
        files: Mapping[str, Path],
        say: Callable[[str], None],
        is_stopped: Callable[[], bool],
        ended: Callable[[int, float], None] = lambda step, began: None,
    ) -> None:
        """Store the settings. `files`: the file of each evaluation set; `ended`: called with the step and the start
        time of each evaluation that ended."""
        self._data, self._run, self._sync_every = data, run, sync_every
        self._pool, self._folder, self._files = generator_pool, folder, files
        self._say, self._is_stopped, self._ended = say, is_stopped, ended
        self._evaluated: int | None = None
        """The newest step whose weights were evaluated."""
        self._numbers: dict[str, float] = {}
        """Results that are not in `metrics.jsonl` yet."""

    def is_due(self, step: int) -> bool:
        """Return whether an evaluation is due: every `data.eval_every` steps, and after the last step if the
        engines get the weights of that step."""
        every = self._data.eval_every
        is_last = step == self._run.max_steps and step % self._sync_every == 0
        return every > 0 and (step % every == 0 or is_last)

    def continue_from(self, step: int) -> bool:
        """Record that a trainer begins at this step. Returns True if the evaluation of this step, or of an earlier
        step, is missing."""
        if self._numbers.get("eval/step", 0) > step:
            self._numbers.clear()
        recorded = [line["step"] for line in read_lines(self._folder.path / EVALUATIONS)]
        self._evaluated = max(recorded, default=None)
        every = self._data.eval_every
        return every > 0 and (self._evaluated is None or self._evaluated < step - step % every)

    def numbers(self, step: int) -> dict[str, float]:
        """Return the numbers for a step's line of `metrics.jsonl`: the results of evaluations that ended after the
        previous line."""
        numbers, self._numbers = self._numbers, {}
        if every := self._data.eval_every:
            numbers["eval/lag_intervals"] = (step - (self._evaluated or 0)) / every
        return numbers

    async def at(self, step: int) -> None:
        """Evaluate every set on all engines while training waits. Ends early if the run is stopped.

        After the last step all rows of a set are used; after earlier steps, a sample of `data.eval_rows` rows.
        """
        start, data = time.monotonic(), self._data
        rows = None if step == self._run.max_steps else data.eval_rows
        results: list[Evaluation] = []
        for name, path in self._files.items():
            evaluation = await self._unless_stopped(self.of_set(name, path, data.eval_samples, rows))
            if evaluation is not None:
                results.append(evaluation)
        self._record(step, start, results)

    async def of_set(self, name: str, tasks_file: Path, n_samples: int, most: int | None = None) -> Evaluation | None:
        """Evaluate a set, or a sample of `most` prompts, on all engines; None if the evaluation failed.

        No trajectory is submitted to the buffer.
        """
        up, why = self._pool.up(), "no generator is up"
        self._pool.evaluating |= set(up)  # meanwhile they leave only if their node ends
        try:
            if up:
                async with asyncio.timeout(self._data.eval_deadline):
                    return await evaluate_on(list(up.values()), name, tasks_file, n_samples, most)
        except TimeoutError:
            why = f"it took more than {self._data.eval_deadline:.0f} s"
        except ACTOR_FAILED as error:
            why = in_a_line(error)
        finally:
            self._pool.evaluating -= set(up)
        self._say(f"the evaluation of {name} was given up: {why}")
        return None

    async def _unless_stopped(self, evaluating: Any) -> Any:
        """Wait for an evaluation, or cancel it if the run is stopped."""
        task = asyncio.ensure_future(evaluating)
        try:
            while not task.done() and not self._is_stopped():
                await asyncio.wait([task], timeout=STOP_CHECK_SECONDS)
            return task.result() if task.done() else None
        finally:
            task.cancel()

    def _record(self, step: int, start: float, results: Sequence[Evaluation]) -> None:
        self._numbers["timing/eval"] = time.monotonic() - start
        if not results:
            return
        self._ended(step, start)
        self._evaluated = step
        self._folder.append_evaluations(step, [evaluation.record() for evaluation in results])
        self._say(f"evaluation after step {step}:")
        for line in table(results).splitlines():
            self._say(f"  {line}")
        self._numbers["eval/step"] = step
        for evaluation in results:
            self._numbers |= evaluation.metrics()
