"""`baton sft`: supervised training on conversations by the trainer's ranks, without engines and buffer."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

import numpy as np

from actors.driver.authentication import keep_token_private
from actors.driver.cluster import place_trainer
from actors.driver.node_check import RunFiles, check_nodes
from actors.driver.placement import gpus_each, rank_bundle, reserve
from actors.driver.ray_session import ray_session
from actors.driver.run import guarded
from actors.driver.signals import on_stop_signal
from actors.trainer.group import TrainerGroup
from actors.weights.part import TrainerLost
from service.config import Config, resolved_yaml
from service.errors import RunFailed
from service.learn.model.optimizer import learning_rate
from service.observe.summary import duration
from service.run.folder import CHECKPOINTS, FINAL, LOGS, lock_run, new_run_folder, runs_folder
from service.run.phases import phase, say
from service.run.records.writer import RunWriter
from service.types import SupervisedRow

Rows = Sequence[SupervisedRow]
Held = Mapping[str, Rows]
"""The rows of each evaluation set, by the set's name."""
QUIET_SECONDS = 2.0
"""Seconds after which a line names the phase that is in progress."""
RECENT_STEPS = 20
"""Number of optimizer steps whose mean time predicts the time that is left."""


def sft(config: Config, model: Path, train: Rows, held_out: Held) -> int:
    """Train the model to the end, to a stop signal or to a failure (`RunFailed`). Returns the exit code. `UserError` if
    Ray has no authentication, a file cannot be written, or a node cannot take part."""
    keep_token_private(os.environ, Path.home())
    path = new_run_folder(runs_folder(config.run.dir), config.run.name)
    folder = RunWriter(path)
    with lock_run(path):
        return guarded(folder, partial(_sft, config, model, train, held_out, folder))


def _sft(config: Config, model: Path, train: Rows, held_out: Held, folder: RunWriter) -> int:
    folder.begin(resolved_yaml(config), config.metrics.wandb, model)
    steps, batch, rows = config.run.max_steps, config.trainer.mini_batch_size, len(train)
    say(f"run folder: {folder.path}")
    say(f"{steps} optimizer steps of {batch} conversations; the data has {rows}: {steps * batch / rows:.2f} epochs")
    with ExitStack() as held:
        with phase("starting Ray"):
            held.enter_context(ray_session(config, uuid.uuid4().hex[:12], folder.path / LOGS))
        try:
            return asyncio.run(_until_stopped(config, model, train, held_out, folder))
        except TrainerLost as lost:
            raise RunFailed(f"{lost}; {folder.path / LOGS} has what each rank printed") from lost
        finally:
            folder.close()


async def _until_stopped(config: Config, model: Path, train: Rows, held_out: Held, folder: RunWriter) -> int:
    stopped: list[int] = []
    with on_stop_signal(stopped.append, lambda number: os._exit(128 + number)):
        gpus = gpus_each()
        bundles = [rank_bundle(config, gpus)] * config.trainer.ranks
        room = await reserve(bundles, config.run.start_deadline, say)
        await asyncio.to_thread(check_nodes, room, bundles, RunFiles.of(model, (), folder.path))
        trainer = place_trainer(config, gpus, room, hub=None)
        with phase("loading the model: trainer ranks start"):
            await trainer.load(model)
        training = _Training(config, held_out, trainer, folder)
        if not stopped:
            await training.evaluate()
        for rows in _batches(train, config):
            if stopped or folder.step == config.run.max_steps:
                break
            await training.step(rows)
        return await training.end(stopped)


def _batches(rows: Rows, config: Config) -> Iterator[list[SupervisedRow]]:
    """Yield the rows of each step, in endless epochs. With `data.shuffle` each epoch has another order."""
    rng, number = np.random.default_rng(config.run.seed), len(rows)
    epochs = (rng.permutation(number) if config.data.shuffle else range(number) for _ in count())
    order = chain.from_iterable(epochs)
    while True:
        yield [rows[i] for i in islice(order, config.trainer.mini_batch_size)]


class _Training:
    """Takes the steps, measures the evaluation sets, and writes the results."""

    def __init__(self, config: Config, held_out: Held, trainer: TrainerGroup, folder: RunWriter) -> None:
        self._config, self._held_out, self._trainer, self._folder = config, held_out, trainer, folder
        self._losses: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        """The seconds of the last steps."""

    async def evaluate(self) -> None:
        """Measure the loss per token of every evaluation set."""
        for name, rows in self._held_out.items():
            with phase(f"evaluating {name}", after=QUIET_SECONDS):
                self._losses[f"eval/{name}/loss"] = await self._loss(rows)
        if losses := ", ".join(f"{name} {loss:.4f}" for name, loss in self._losses.items()):
            say(f"after step {self._folder.step}: {losses}")

    async def _loss(self, rows: Rows) -> float:
        """Return the loss per token of these rows, measured by mini-batches, because each call has a deadline."""
        size = self._config.trainer.mini_batch_size
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        losses = [await self._trainer.supervised(part, lr=None) for part in parts]
        return float(np.average(losses, weights=[sum(np.sum(row.loss_mask) for row in part) for part in parts]))

    async def step(self, rows: Rows) -> None:
        """Take an optimizer step, and then do the evaluation and the checkpoint that are due."""
        config, began, step = self._config, time.monotonic(), self._folder.step + 1
        steps, lr = config.run.max_steps, learning_rate(config.trainer, step - 1, config.run.max_steps)
        loss = await self._trainer.supervised(rows, lr)
        seconds, tokens = time.monotonic() - began, sum(len(row.token_ids) for row in rows)
        numbers = {"trainer/global_step": step, "sft/loss": loss, "policy/policy_lr": lr, "timing/step": seconds}
        self._folder.step = step
        self._recent.append(seconds)
        left = (steps - step) * sum(self._recent) / len(self._recent)
        text = f"step {step} of {steps}: loss {loss:.4f}, {tokens / seconds:.0f} tokens/s"
        say(text + (f", {duration(left)} left" if step < steps else ""))
        if step == steps or (config.data.eval_every and step % config.data.eval_every == 0):
            await self.evaluate()
            numbers |= self._losses
        self._folder.log_step(numbers | {"sft/tokens": tokens})
        every, kept = config.trainer.checkpoint_every, config.trainer.keep_checkpoints
        if every and step % every == 0 and step < steps:
            await self._export(f"{CHECKPOINTS}/step_{step}")
            shutil.rmtree(self._folder.path / CHECKPOINTS / f"step_{step - every * kept}", ignore_errors=True)

    async def end(self, stopped: Sequence[int]) -> int:
        """Write the final weights and the summary; returns the exit code."""
        if self._folder.step:
            await self._export(FINAL)
        state, steps = "stopped" if stopped else "finished", self._folder.step
        self._folder.write_summary({"state": state, "steps": steps, **self._losses})
        say(f"{state} after {steps} steps" + ("" if steps else ", so there are no new weights to write"))
        return 128 + stopped[0] if stopped else 0

    async def _export(self, where: str) -> None:
        with phase(f"writing {where}", after=QUIET_SECONDS):
            await self._trainer.export(self._folder.path / where)
        say(f"wrote {self._folder.path / where}")
