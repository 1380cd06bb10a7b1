"""Records what a run does: telemetry, progress, records of trajectories, failures and scrape targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import tensorboard.summary.writer.record_writer  # noqa: F401 - it takes a second: not in the first step

from actors.buffer.actor import LeasedBatch
from actors.calls import ACTOR_FAILED, call
from actors.driver.cluster import Cluster
from actors.observe.metrics_hub import ScrapeTargets
from actors.observe.telemetry import RunTelemetry
from service.config import Config
from service.errors import RunFailed
from service.handoff.verbs import Wait
from service.observe.bound_by import SCORERS
from service.observe.not_learning import LogprobCheck, after_warm_start
from service.run.liveness.repeated_failures import FailureWatch
from service.run.liveness.supervisor import Supervisor
from service.run.phases import phase
from service.run.records.progress import QUIET_SECONDS, Progress
from service.run.records.trajectories import describe_ends
from service.run.records.writer import RunWriter
from service.types import PolicyVersion

HUB_SECONDS = 5.0
"""Seconds in which the metrics hub must say what bound the run."""
MAX_BAD_STEPS = 10
"""Number of successive optimizer steps that were not applied, after which the run fails."""


class RunObserver:
    """Records and reports what the driver's loop does. The loop calls its methods. It changes nothing in the run, but
    ends a run that cannot make progress."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        folder: RunWriter,
        say: Callable[[str], None],
        uploads: Any,
        supervisor: Supervisor,
    ) -> None:
        """Store the parts. `uploads`: the uploads to the object store, or None."""
        self._config, self._folder, self._say, self._supervisor = config, folder, say, supervisor
        self.telemetry = RunTelemetry(config, cluster.hub, str(folder.path), uploads)
        resumes, seconds = bool(config.trainer.checkpoint_every), self.telemetry.states.seconds
        self.progress = Progress(
            config.run.max_steps, tuple(config.roles), resumes, folder, say, lambda: {**seconds(), SCORERS: self.scored}
        )
        samples = config.trainer.mini_batch_size * config.algorithm.n_samples_per_prompt
        self._failures = FailureWatch(2 * samples, say, self.telemetry.failing)
        self._logprobs = LogprobCheck(config.weights)
        self._hub = cluster.hub
        self._targets = ScrapeTargets(folder.path, folder.write_targets)
        self._waits_for = ""
        self._bad_steps = 0
        self.scored = 0.0
        """Seconds for which leases have waited for scorers."""

    def step(self, step: int) -> AbstractContextManager[None]:
        """Within the block, a line says from time to time what the step waits for."""
        return phase(f"step {step}", self._say, self._waited_for, after=QUIET_SECONDS, seconds=QUIET_SECONDS)

    def doing(self, state: str, waits_for: str = "", **detail: Any) -> None:
        """The loop does this now; `waits_for`: what a step waits for."""
        self._waits_for = waits_for or self._waits_for
        self.telemetry.doing(state, **detail)

    def _waited_for(self) -> str:
        lost = self._supervisor.lost()
        return self._waits_for + (f"; restarting: {', '.join(lost)}" if lost else "")

    def scorers_failed(
        self, failures: Mapping[tuple[str, str], str], in_a_row: Mapping[str, tuple[int, float]], waited: float
    ) -> None:
        """Print which scorers fail. `RunFailed` if a scorer gave no good answer about as many groups in a row as two
        mini-batches have; a scorer that gave good answers before also has `run.stall_deadline`. Arguments: see
        `BufferActor.scorer_failures`."""
        self.scored = waited
        self._failures.name_scorers(failures)
        for scorer, (refused, seconds) in in_a_row.items():
            if refused >= 2 * self._config.trainer.mini_batch_size and seconds >= self._config.run.stall_deadline:
                why = "; ".join(f"{reason}: {text}" for (name, reason), text in failures.items() if name == scorer)
                raise RunFailed(f"scorer {scorer} gave no good answer about {refused} groups in a row: {why}")

    def waits(self, wait: Wait, seconds: float, generators: Sequence[Mapping[str, Any]]) -> None:
        """There was no mini-batch for `seconds`. `RunFailed` if this is too long, or trajectories fail too often.
        `generators`: their statuses."""
        self.doing("waiting", f"a mini-batch: {wait.detail}", reason=wait.reason, detail=wait.detail)
        self._failures.check(generators, seconds)
        if seconds > self._config.run.stall_deadline:
            gone = ", ".join(self._supervisor.lost())
            back = f"; {gone} did not come back: where its host is lost, no other has room (`ray status`)"
            why = f"no mini-batch for {self._config.run.stall_deadline:.0f} s: {wait.detail}"
            raise RunFailed(why + (back if gone else ""))

    def leased(self, batch: LeasedBatch) -> None:
        """A mini-batch was leased; the trainer takes the step."""
        self._folder.append_trajectories(batch.lost)
        self.doing("step", "the trainer")

    def not_applied(self, batch: LeasedBatch, step: int, reason: str) -> None:
        """A step was not applied. `RunFailed` if this happened `MAX_BAD_STEPS` times in a row."""
        self._bad_steps += 1
        self.telemetry.metrics.count("baton_aborted_steps_total")
        self._say(f"step {step} was not applied: {reason}")
        if self._bad_steps >= MAX_BAD_STEPS:
            ends = describe_ends(batch.trajectories)
            raise RunFailed(
                f"{self._bad_steps} optimizer steps in a row were not applied; the last one: {reason}"
                + (f" (some of its trajectories: {ends})" if ends else "")
            )

    def applied(self, step: int, measured: Mapping[str, float]) -> None:
        """A step was applied, and its commit follows. `RunFailed` if the log-probabilities of trainer and engines
        differ."""
        if (why := self._logprobs.mismatch(step, measured)) is not None:
            raise RunFailed(why)
        self._bad_steps = 0
        self.doing("commit")

    async def stepped(
        self,
        version: PolicyVersion,
        batch: LeasedBatch,
        measured: Mapping[str, float],
        generators: Sequence[dict[str, Any]],
    ) -> None:
        """A step is complete. `measured`: metrics of the step and its evaluation; `generators`: their statuses."""
        self._failures.stepped(generators)
        self._folder.append_trajectories(batch.trajectories)
        line = self.progress.stepped(version, batch.metrics, measured, generators)
        if self._config.model.warm_start is not None and version.step == 1:
            self._say(after_warm_start(line))
        self.telemetry.stepped(version, line, self.progress.seconds_left, self.progress.not_learning)
        await self.write_targets()

    async def write_targets(self) -> None:
        """Write the addresses at which Prometheus scrapes the run, unless they were just written."""
        await self._targets.write()

    async def ended(self, state: str, status: dict[str, Any], generators: Sequence[dict[str, Any]]) -> None:
        """The run has ended in this state. `status`: of the buffer; `generators`: their statuses."""
        said: dict[str, Any] = {"failing": self._failures.many, "restarts": dict(self._supervisor.restarts)}
        if state == "finished":
            said["sessions_cut"] = sum(generator.get("sessions", 0) for generator in generators)
        with suppress(*ACTOR_FAILED):  # without a hub, the summary has the driver's own times
            said["binding"] = await call(self._hub.binding, who="the metrics hub", within=HUB_SECONDS)
        self.progress.end(state, status, generators, said)
