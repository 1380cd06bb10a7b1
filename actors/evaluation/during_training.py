"""The evaluations of a run. An evaluation plays every evaluation set with the weights of one step; its results are
written to the run folder and the terminal.

pause    training waits until all engines have evaluated
beside   some engines keep the evaluated weights; the trainer and the other engines continue; results come some steps
         later
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.calls import ACTOR_FAILED, in_a_line
from actors.evaluation.evaluator import evaluate_on
from actors.generator.generator_pool import GeneratorPool
from actors.weights.delivery import Kept
from service.config import DataConfig, RunConfig
from service.errors import Starved
from service.evaluation.report import table
from service.evaluation.scores import Evaluation
from service.run.folder import EVALUATIONS, read_lines
from service.run.writer import RunWriter

STOP_CHECK_SECONDS = 0.5
"""Seconds between two checks whether the run was stopped."""


class Evaluations:
    """Evaluates on the run's generators, while training waits or beside it."""

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
        """Store the settings; `files` maps each evaluation set to its rows; `ended` is called with the step and the
        start time of each evaluation that ended."""
        self._data, self._run, self._sync_every = data, run, sync_every
        self._pool, self._folder, self._files = generator_pool, folder, files
        self._say, self._is_stopped, self._ended = say, is_stopped, ended
        self._running: asyncio.Task[None] | None = None
        """The evaluation beside training."""
        self._of_step = 0
        """The step whose weights the evaluation beside training evaluates."""
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
        """Note that a trainer begins at this step; returns True if an evaluation of this step or an earlier step is
        missing."""
        self._look()
        if self._running is not None and self._of_step > step:
            self._running.cancel()
            self._running = None
        if self._numbers.get("eval/step", 0) > step:
            self._numbers.clear()
        recorded = [line["step"] for line in read_lines(self._folder.path / EVALUATIONS)]
        self._evaluated = max(recorded, default=None)
        every = self._data.eval_every
        missing = every > 0 and (self._evaluated is None or self._evaluated < step - step % every)
        return missing and self._running is None

    def begin(self, step: int) -> bool:
        """Begin to evaluate the newest weights, which `step` produced, beside training. Returns False if training has
        to wait for the evaluation.

        An evaluation that is due while another evaluation runs is skipped.
        """
        if self._data.eval_mode == "pause" or step == self._run.max_steps:
            return False
        self._look()
        if self._running is not None:
            self._say(f"the evaluation after step {step} is left out: that of step {self._of_step} still runs")
            return True
        kept = self._keep()
        if kept is not None:
            self._of_step = step
            self._running = asyncio.ensure_future(self._beside(kept))
        return kept is not None

    def numbers(self, step: int) -> dict[str, float]:
        """Return the numbers for a step's line of `metrics.jsonl`: the results of evaluations that ended after the
        previous line."""
        self._look()
        numbers, self._numbers = self._numbers, {}
        if every := self._data.eval_every:
            numbers["eval/lag_intervals"] = (step - (self._evaluated or 0)) / every
        return numbers

    async def at(self, step: int) -> None:
        """Evaluate every set on all engines while training waits; ends early if the run is stopped.

        After the last step all rows of a set are used; after earlier steps, a sample of `data.eval_rows` rows.
        """
        await self.settled()
        start, data = time.monotonic(), self._data
        rows = None if step == self._run.max_steps else data.eval_rows
        results: list[Evaluation] = []
        for name, path in self._files.items():
            evaluation = await self._unless_stopped(self.of_set(name, path, data.eval_samples, rows))
            if evaluation is not None:
                results.append(evaluation)
        self._record(step, start, results)

    async def settled(self) -> None:
        """Wait until the evaluation beside training has ended, or the run is stopped."""
        if self._running is not None:
            running, self._running = self._running, None
            await self._unless_stopped(running)

    async def of_set(self, name: str, tasks_file: Path, n_samples: int, most: int | None = None) -> Evaluation | None:
        """Evaluate a set, or a sample of `most` prompts, on all engines; None if the evaluation failed.

        No trajectory is submitted to the buffer.
        """
        up = self._pool.up()
        if not up:
            self._say(f"the evaluation of {name} was given up: no generator is up")
            return None
        try:
            return await self._evaluated_on(up, name, tasks_file, n_samples, most)
        except ACTOR_FAILED as error:
            self._say(f"the evaluation of {name} was given up: {in_a_line(error)}")
            return None

    def _look(self) -> None:
        """If the evaluation beside training has ended, forget it; raises the error with which it failed, if any."""
        if self._running is not None and self._running.done():
            self._running.result()
            self._running = None

    def _keep(self) -> Kept | None:
        return self._pool.weights.keep(self._pool.up(), self._data.eval_engines)

    async def _beside(self, kept: Kept | None) -> None:
        """Evaluate every set on engines that keep their weights; if an engine is lost, begin again with the newest
        weights."""
        data = self._data
        for tries_left in reversed(range(self._run.max_restarts + 1)):
            if kept is None:
                return self._say(f"the evaluation after step {self._of_step} was given up: too few engines are up")
            start, results = time.monotonic(), list[Evaluation]()
            try:
                if kept.arriving is not None:
                    await asyncio.wait([kept.arriving])
                for name, path in self._files.items():
                    of = kept.generators, name, path, data.eval_samples, data.eval_rows, kept.version.pack()
                    results.append(await self._evaluated_on(*of))
                return self._record(kept.version.step, start, results)
            except ACTOR_FAILED as error:
                given_up = isinstance(error, Starved) or not tries_left
                why = "was given up" if given_up else "begins anew with the newest weights"
                self._say(f"the evaluation after step {kept.version.step} {why}: {in_a_line(error)}")
                if given_up:
                    return
            finally:
                await self._pool.weights.release(kept)
            if (kept := self._keep()) is not None:
                self._of_step = kept.version.step

    async def _evaluated_on(
        self, up: Mapping[str, Any], name: str, path: Path, n_samples: int, most: int | None, version: int | None = None
    ) -> Evaluation:
        """Evaluate a set on these generators; meanwhile none of them leaves unless its node ends.

        Raises:
            Starved: the evaluation took longer than `data.eval_deadline`.
        """
        deadline = self._data.eval_deadline
        self._pool.evaluating |= set(up)
        try:
            async with asyncio.timeout(deadline):
                return await evaluate_on(list(up.values()), name, path, n_samples, most, version)
        except TimeoutError:
            raise Starved(f"it took more than {deadline:.0f} s") from None
        finally:
            self._pool.evaluating -= set(up)

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
