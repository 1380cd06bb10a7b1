"""The progress of a run: a line of metrics per optimizer step, lines for the terminal, the curve and the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from service.observe.summary import learning_summary, summary_lines
from service.rollout.environment import MAIN
from service.rollout.environments.env_metrics import EnvMetricMeans
from service.run.writer import RunWriter
from service.types import PolicyVersion

LINES = 20
"""About how many progress lines a run of quick steps prints."""
QUIET_SECONDS = 60.0
"""Longest time without a progress line: the next step after it prints one in any case."""
PLOT_SECONDS = 20.0
"""Seconds between two drawings of the learning curve during the run."""


class Progress:
    """Writes the metrics of each step to the run folder, and prints progress lines."""

    def __init__(
        self, max_steps: int, roles: Sequence[str], resumes: bool, folder: RunWriter, say: Callable[[str], None]
    ) -> None:
        """`roles`: the roles of the configuration; `resumes`: whether there are checkpoints to continue from."""
        self._max_steps, self._roles, self._resumes = max_steps, roles, resumes
        self._folder = folder
        self._say = say
        self._created = self._began = self._last = self._plotted = self._said = time.monotonic()
        self._waited = self._waited_this_step = 0.0
        self._synced: float | None = None
        self._env_metrics = EnvMetricMeans()
        self._rewards: list[float] = []
        self._staleness: list[float] = []
        self._success: float | None = None

    def begin(self) -> None:
        """Record that reinforcement learning begins, or continues after the steps of an earlier process."""
        self._began = self._last = self._said = time.monotonic()
        total, taken = self._max_steps, len(self._rewards)
        steps = f"steps {taken + 1} to {total}" if taken else f"{total} optimizer steps"
        steps = f"all {taken} steps are done before" if taken >= total else steps
        self._say(f"training: {steps} ({self._began - self._created:.0f} s so far)")

    def probed(self, success: float, expected: tuple[float, float]) -> None:
        """Record the fraction of sampled tasks that was solved after the warm start."""
        self._success = success
        low, high = expected
        verdict = "as expected" if low <= success <= high else "OUTSIDE what was expected"
        self._say(f"warm start: {success:.2f} of sampled tasks solved, {verdict} ({low:.2f} to {high:.2f})")

    def go_on_from(self, step: int) -> None:
        """Continue training after this step; the metrics of later steps are dropped and measured again."""
        lines = self._folder.cut_after(step)
        self._rewards = [line["reward/avg_raw_reward"] for line in lines]
        self._staleness = [line["async/staleness_mean"] for line in lines]

    def waited(self, seconds: float) -> None:
        """Record a wait of the trainer for a mini-batch."""
        self._waited += seconds
        self._waited_this_step = seconds

    def synced(self, seconds: float | None) -> None:
        """Record how long the engines took to serve new weights after these were sent; None if no update was under
        way."""
        self._synced = self._synced if seconds is None else seconds

    def stepped(
        self,
        version: PolicyVersion,
        batch: Mapping[str, float],
        metrics: Mapping[str, float],
        generators: Sequence[Mapping[str, Any]],
    ) -> dict[str, float]:
        """Record a committed optimizer step; returns its line of `metrics.jsonl`."""
        now = time.monotonic()
        line = {
            "trainer/global_step": version.step,
            "trainer/incarnation": version.incarnation,
            **batch,
            **metrics,
            "timing/step": now - self._last,
            "timing/wait_for_generation_buffer": self._waited_this_step,
            **({} if self._synced is None else {"timing/sync_weights": self._synced}),
            **self._wait_fractions(now, generators),
            **self._env_metrics.since(generators),
        }
        self._synced = None  # otherwise every step until the next update would count this one again
        self._folder.log_step(line)
        self._last = now
        if not self._rewards and (silent := [role for role in self._roles if f"role/{role}/turns" not in line]):
            self._say(
                f"NOTE roles.{silent[0]}: no trajectory of the first mini-batch gave it a turn; turns had "
                f"{', '.join(role for role in (MAIN, *self._roles) if role not in silent)}"
            )
        self._rewards.append(line["reward/avg_raw_reward"])
        self._staleness.append(line["async/staleness_mean"])
        if version.step % max(1, self._max_steps // LINES) == 0 or now - self._said > QUIET_SECONDS:
            self._say(step_line(line, self._max_steps, now - self._began))
            self._said = now
        if now - self._plotted > PLOT_SECONDS:
            self._folder.plot()
            self._plotted = time.monotonic()
        return line

    def end_early(self, steps: int = 0) -> None:
        """Record that this process was stopped before its first step; `steps`: steps of the run's earlier processes."""
        end_early(self._folder, self._say, steps, seconds=time.monotonic() - self._created)

    def end(self, state: str, buffer: Mapping[str, Any], generators: Sequence[Mapping[str, Any]]) -> None:
        """End the run: draw the curve, write and print the summary."""
        now = time.monotonic()
        fractions = self._wait_fractions(now, generators)
        summary = {
            "state": state,
            "steps": len(self._rewards),
            "seconds": now - self._created,
            "rl_seconds": now - self._began,
            "warm_start_success": self._success,
            **learning_summary(self._rewards, self._staleness),
            **{key.removeprefix("async/"): fraction for key, fraction in fractions.items()},
            **{key: buffer[key] for key in ("tokens", "length_distance", "token_length_distance", "lengths")},
        }
        self._folder.write_summary(summary)
        if self._rewards:
            self._folder.plot()
        for text in summary_lines(summary):
            self._say(text)
        curve = "learning_curve.png, metrics.jsonl, " if self._rewards else ""
        self._say(f"written to {self._folder.path}: {curve}summary.json, final/")
        if state == "stopped" and self._resumes:
            self._say(f"`baton run --resume {self._folder.path}` goes on from here")

    def _wait_fractions(self, now: float, generators: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The fractions of time for which the trainer and the generators waited."""
        elapsed = sum(status["elapsed_seconds"] for status in generators)
        waited = sum(status["wait_seconds"] for status in generators)
        return {
            "async/trainer_wait_fraction": self._waited / (now - self._began),
            "async/generator_wait_fraction": waited / elapsed if elapsed else 0.0,
        }


def end_early(folder: RunWriter, say: Callable[[str], None], steps: int, **more: float) -> None:
    """Summarize a run that was stopped before it took another step than the `steps` of an earlier process."""
    folder.write_summary({"state": "stopped", "steps": steps, **more})
    say(f"stopped after the {steps} optimizer steps before" if steps else "stopped before the first optimizer step")


def step_line(line: Mapping[str, float], max_steps: int, seconds: float) -> str:
    """The progress line of a step."""
    return (
        f"step {line['trainer/global_step']:>4}/{max_steps}  reward {line['reward/avg_raw_reward']:.3f}"
        f"  staleness {line['async/staleness_mean']:.2f}  padded length {line['generate/batch_padded_seq_len']:.0f}"
        f"  trainer waited {line['async/trainer_wait_fraction']:.0%}"
        f"  generators waited {line['async/generator_wait_fraction']:.0%}  {seconds:.0f} s"
    )
