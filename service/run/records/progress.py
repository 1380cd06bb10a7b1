"""Reports the progress of a run: metrics of each optimizer step, lines on the terminal, the learning curve, the
summary."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from service.observe.bound_by import SCORERS
from service.observe.not_learning import Diagnosis, in_words
from service.observe.summary import duration, learning_summary, summary_lines
from service.rollout.environment import MAIN
from service.run.records.writer import RunWriter
from service.types import PolicyVersion

LINES = 20
"""Approximate number of progress lines that a run with quick steps prints, not counting the line of the first step."""
QUIET_SECONDS = 20.0
"""Seconds without a progress line after which the next step always prints one."""
PLOT_SECONDS = 20.0
"""Minimum seconds between two drawings of the learning curve during the run."""

RECENT_STEPS = 20
"""Number of steps over which a progress line averages times, to estimate the time left."""

GENERATION = "generation"
"""Name of the part of a step in which the trainer waits for generation."""
PARTS = {"waiting": GENERATION, "step": "training", "evaluating": "evaluation"}
"""For a state of the driver, the part of a step to which its time belongs. Any other state is a part of the same
name."""


class StepTimes:
    """Measures how long each part of the optimizer steps takes: `generation` while the trainer waits for a mini-batch,
    `training`, `evaluation`, and the driver's other states under their own names.

    driver's states  waiting 6.0 s, step 3.0 s, weights 1.0 s   ->   generation 60%, training 30%, weights 10%
    """

    def __init__(self, states: Callable[[], Mapping[str, float]]) -> None:
        """`states`: returns the seconds that the driver has spent in each of its states so far."""
        self._states = states
        self._before: Counter[str] = Counter()
        self._all: Counter[str] = Counter()

    def begin(self) -> None:
        """Begin the first step."""
        self._before = Counter(self._states())

    def stepped(self) -> Counter[str]:
        """End the current optimizer step and begin the next one. Returns the seconds of the ended step for each
        part."""
        now = Counter(self._states())
        step = Counter({PARTS.get(state, state): seconds for state, seconds in (now - self._before).items()})
        step[GENERATION] -= step[SCORERS]  # the wait includes scoring
        self._before, self._all = now, self._all + step
        return step

    def shares(self) -> dict[str, float]:
        """For each part, its fraction of the time of all optimizer steps; the largest fraction comes first."""
        return {part: seconds / self._all.total() for part, seconds in self._all.most_common()}


class Progress:
    """Writes the metrics of each optimizer step to the run folder, and prints progress lines."""

    def __init__(
        self,
        max_steps: int,
        roles: Sequence[str],
        resumes: bool,
        folder: RunWriter,
        say: Callable[[str], None],
        states: Callable[[], Mapping[str, float]],
    ) -> None:
        """`roles`: the names of the configured roles; `resumes`: whether the run can be resumed from a checkpoint;
        `states`: returns the seconds that the driver has spent in each of its states so far."""
        self._max_steps, self._roles, self._resumes = max_steps, roles, resumes
        self._folder = folder
        self._say = say
        self._created = self._began = self._last = self._plotted = self._said = time.monotonic()
        self._times = StepTimes(states)
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        """Seconds of each of the last steps."""
        self._seconds_before = 0.0
        """Seconds that earlier processes of this run took until the step from which it continues."""
        self._synced: float | None = None
        self._rewards: list[float] = []
        self._staleness: list[float] = []
        self._diagnosis = Diagnosis()
        self._diagnosed: set[str] = set()
        """Names of the symptoms that were already reported."""

    def begin(self) -> None:
        """Record and print that reinforcement learning begins, or continues after the steps of an earlier process."""
        self._began = self._last = self._said = time.monotonic()
        self._times.begin()
        total, taken = self._max_steps, len(self._rewards)
        steps = f"steps {taken + 1} to {total}" if taken else f"{total} optimizer steps"
        steps = f"all {taken} steps are done before" if taken >= total else steps
        self._say(f"training: {steps} ({self._began - self._created:.0f} s so far)")

    def go_on_from(self, step: int) -> None:
        """Continue training after `step`. The metrics of later steps are deleted, because these steps are taken
        again."""
        lines = self._folder.cut_after(step)
        self._rewards = [line["reward/avg_raw_reward"] for line in lines]
        self._staleness = [line["async/staleness_mean"] for line in lines]
        self._seconds_before = lines[-1].get("timing/since_start", 0.0) if lines else 0.0
        self._diagnosis = Diagnosis(lines)

    def synced(self, seconds: float | None) -> None:
        """Record how long a weight update took. `seconds`: from sending new weights until the engines used them; None
        if there was no update."""
        self._synced = self._synced if seconds is None else seconds

    def stepped(
        self,
        version: PolicyVersion,
        batch: Mapping[str, float],
        metrics: Mapping[str, float],
        generators: Sequence[Mapping[str, Any]],
    ) -> dict[str, float]:
        """Record a committed optimizer step: write its metrics to `metrics.jsonl`, and return them. They are the
        numbers of the mini-batch, of training and of the generators."""
        now, spent = time.monotonic(), self._times.stepped()
        line = {
            "trainer/global_step": version.step,
            "trainer/incarnation": version.incarnation,
            **batch,
            **metrics,
            "timing/step": now - self._last,
            "timing/wait_for_generation_buffer": spent[GENERATION] + spent[SCORERS],
            "timing/since_start": self._seconds_before + now - self._created,
            **({} if self._synced is None else {"timing/sync_weights": self._synced}),
            **self._wait_fractions(generators),
        }
        self._synced = None  # else later steps would count this update again
        wall = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._folder.log_step(line, {"time": wall, "bound_by": max(spent, key=lambda part: spent[part], default="")})
        self._recent.append(now - self._last)
        self._last = now
        if not self._rewards and (silent := [role for role in self._roles if f"role/{role}/turns" not in line]):
            self._say(
                f"NOTE roles.{silent[0]}: no trajectory of the first mini-batch gave it a turn; turns had "
                f"{', '.join(role for role in (MAIN, *self._roles) if role not in silent)}"
            )
        self._rewards.append(line["reward/avg_raw_reward"])
        self._staleness.append(line["async/staleness_mean"])
        first, due = len(self._recent) == 1, version.step % max(1, self._max_steps // LINES) == 0
        if first or due or now - self._said > QUIET_SECONDS:
            mean, left = sum(self._recent) / len(self._recent), self.seconds_left
            self._say(step_line(line, self._max_steps, mean, self._times.shares(), now - self._began, left))
            self._said = now
        self._diagnosis.stepped(line)
        found = self._diagnosis.found()
        if (cause := next(iter(found), None)) is not None and cause not in self._diagnosed:
            self._diagnosed.add(cause)
            self._say(f"step {version.step}: the policy may not learn: {in_words(found)}")
        if now - self._plotted > PLOT_SECONDS:
            self._folder.plot()
            self._plotted = time.monotonic()
        return line

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last optimizer step, from the mean time of the last steps; None before the first
        step."""
        if not self._recent:
            return None
        return max(0, self._max_steps - len(self._rewards)) * sum(self._recent) / len(self._recent)

    @property
    def not_learning(self) -> str:
        """Why the policy may not be learning, judged by the last optimizer steps; empty if there is no sign of it."""
        return in_words(self._diagnosis.found())

    def end(
        self,
        state: str,
        buffer: Mapping[str, Any],
        generators: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] = {},
    ) -> None:
        """End the run: draw the learning curve, and write and print the summary. `more`: further entries of the
        summary, which are left out if they are empty."""
        now, shares = time.monotonic(), self._times.shares()
        more = {
            "not_learning_mostly": self._diagnosis.worst(),
            "not_learning": self.not_learning,
            "scorers": buffer.get("scorers"),
            **more,
        }
        fractions = self._wait_fractions(generators)
        summary = {
            "state": state,
            "steps": len(self._rewards),
            "seconds": self._seconds_before + now - self._created,
            "rl_seconds": now - self._began,
            **learning_summary(self._rewards, self._staleness),
            **{key: entry for key, entry in more.items() if entry},
            **({"bound_by": next(iter(shares)), "time": shares} if shares else {}),
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

    def _wait_fractions(self, generators: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The fractions of time for which the trainer and the generators waited."""
        elapsed = sum(status["elapsed_seconds"] for status in generators)
        waited = sum(status["wait_seconds"] for status in generators)
        return {
            "async/trainer_wait_fraction": sum(self._times.shares().get(part, 0.0) for part in (GENERATION, SCORERS)),
            "async/generator_wait_fraction": waited / elapsed if elapsed else 0.0,
        }


def end_early(folder: RunWriter, say: Callable[[str], None], steps: int) -> None:
    """Write the summary of a run that was stopped before this process took a step. `steps`: the number of optimizer
    steps that earlier processes took."""
    folder.write_summary({"state": "stopped", "steps": steps})
    say(f"stopped after the {steps} optimizer steps before" if steps else "stopped before the first optimizer step")


def step_line(
    line: Mapping[str, float],
    max_steps: int,
    mean: float,
    shares: Mapping[str, float],
    seconds: float,
    left: float | None,
) -> str:
    """The progress line of an optimizer step. `mean`: mean seconds of the last optimizer steps; `shares`: for each part
    of a step, such as generation or training, its fraction of the time of all steps, largest first; `seconds`: time
    since RL began; `left`: estimated seconds until the end."""
    bound = "".join(f", bound by {part} ({share:.0%})" for part, share in [*shares.items()][:1])
    until = "" if not left else f", {duration(left)} left"
    pace = f"{mean:.2g}" if mean < 100 else f"{mean:.0f}"
    return (
        f"step {line['trainer/global_step']:>4}/{max_steps}  reward {line['reward/avg_raw_reward']:.3f}"
        f"  staleness {line['async/staleness_mean']:.2f}  {pace} s a step{bound}"
        f"  {duration(seconds)}{until}"
    )
