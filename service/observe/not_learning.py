"""Finds why a run may not learn: compares the metrics of its last optimizer steps with thresholds, likeliest causes
first. Ends a run if engines and trainer compute different log-probabilities from the same weights.

Causes come before their effects. For example, if every response is cut, there is no reward, so groups have no variance
and the gradient is zero: the cut comes first. `docs/not-learning.md` has remedies for each symptom.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from service.config.learn import WeightsConfig
from service.observe.summary import learning_summary

WINDOW = 5
"""Number of last optimizer steps over which a metric is averaged. In a run with fewer steps, no metric is compared."""
FLAT_STEPS = 200
"""A reward without gain over the run, and over this many last optimizer steps, is a symptom. It is judged again every
`FLAT_EVERY` steps."""
FLAT_EVERY = 10
FAST = "too-fast"
Comparison = Literal["at least", "at most", "fallen to", "without gain for"]
"""How a metric compares with its threshold. `fallen to`: it is at most the threshold times its mean over the first
steps. `without gain for`: over so many steps, and over the run, the interval of its gain reaches 0 or less."""


class Symptom(NamedTuple):
    """A reason why a run does not learn, and the metric and the threshold that show it."""

    name: str
    """Name of the symptom, and of its section in `docs/not-learning.md`."""
    key: str
    comparison: Comparison
    threshold: float
    says: str
    """A sentence with a placeholder for the metric's value."""


SYMPTOMS = (
    Symptom("learning-rate", "policy/policy_lr", "at most", 1e-9, "the learning rate is {:.1g}"),
    Symptom(
        "engine-and-trainer", "policy/by_staleness/0/kl", "at least", 0.01, "engine and trainer: {:.2g} nats apart"
    ),
    Symptom("always-solved", "reward/groups_all_one", "at least", 0.8, "in {:.0%} of the groups all samples got 1"),
    Symptom(FAST, "policy/by_staleness/1/kl", "at least", 0.1, "a step moves the policy by {:.2g} nats"),
    Symptom("entropy", "policy/policy_entropy", "fallen to", 0.1, "the entropy fell to {:.0%} of the first steps'"),
    Symptom("too-short", "generate/avg_response_length", "at most", 1.5, "a response has {:.1f} tokens on average"),
    Symptom("shorter", "generate/avg_response_length", "fallen to", 0.2, "responses shrank to {:.0%} of the first"),
    Symptom("cut", "generate/truncated_ratio", "at least", 0.5, "{:.0%} of the responses reach the length limit"),
    Symptom("never-solved", "reward/groups_all_zero", "at least", 0.8, "in {:.0%} of the groups all samples got 0"),
    Symptom("no-variance", "reward/groups_without_variance", "at least", 0.8, "in {:.0%} of groups rewards are equal"),
    Symptom("stale", "policy/policy_kl", "at least", 0.1, "sampled and trained policy differ by {:.2g} nats"),
    Symptom("clipped", "policy/loss_metrics/clip_ratio", "at least", 0.3, "{:.0%} of the loss tokens are clipped"),
    Symptom("no-gradient", "policy/grad_norm", "at most", 1e-8, "the gradient's norm is {:.1g}"),
    Symptom(
        "flat", "reward/avg_raw_reward", "without gain for", FLAT_STEPS, "no gain of reward in {:.0f} steps but noise"
    ),
)


class Diagnosis:
    """Compares the metrics of a run's last optimizer steps (lines of `metrics.jsonl`) with the thresholds."""

    def __init__(self, lines: Sequence[Mapping[str, float]] = ()) -> None:
        self._first: list[Mapping[str, float]] = []
        self._last: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._rewards: list[float] = []
        self._flat_steps: int | None = None
        """Number of steps after which the reward had no gain."""
        self._was: dict[str, tuple[int, int, str]] = {}
        """For each symptom that was the likeliest cause: the number of these steps, the first of them, and a
        description."""
        for line in lines:
            self.stepped(line)

    def stepped(self, line: Mapping[str, float]) -> None:
        """Store the metrics of the next optimizer step: its line of `metrics.jsonl`."""
        self._last.append(line)
        if len(self._first) < WINDOW:
            self._first.append(line)
        self._rewards.append(line["reward/avg_raw_reward"])
        if len(self._rewards) >= FLAT_STEPS and len(self._rewards) % FLAT_EVERY == 0:
            parts = self._rewards, self._rewards[-FLAT_STEPS:]
            gains = any(learning_summary(part, ())["reward_gain_interval"][0] > 0 for part in parts)
            self._flat_steps = None if gains else len(self._rewards)
        for name, said in [*self.found().items()][:1]:
            steps, first, words = self._was.get(name, (0, len(self._rewards), said))
            self._was[name] = steps + 1, first, words

    def worst(self) -> str:
        """The symptom that was the likeliest cause in most steps of the run, as a sentence; empty if it was in few
        steps. A symptom after steps that moved the policy too far is an effect of them."""
        lasting = {name: was for name, was in self._was.items() if was[0] >= WINDOW}
        if not lasting:
            return ""
        name = max(lasting, key=lambda name: lasting[name][0])
        if FAST in lasting and lasting[FAST][1] < lasting[name][1]:
            name = FAST
        steps, first, said = lasting[name]
        return f"in {steps} steps, from step {first} on, {said} (docs/not-learning.md#{name})"

    def found(self) -> dict[str, str]:
        """The symptoms of the last optimizer steps: a description by the symptom's name, the likeliest cause first."""
        found = {}
        for name, key, comparison, threshold, says in SYMPTOMS:
            value = self._flat_steps if comparison == "without gain for" else _mean(self._last, key)
            if value is not None and comparison == "fallen to":
                first = _mean(self._first, key)
                value = value / first if first else None
            if value is not None and (
                value <= threshold if comparison in ("at most", "fallen to") else value >= threshold
            ):
                found[name] = says.format(value)
        return found


def in_words(found: Mapping[str, str]) -> str:
    """The first symptom as a sentence, and the names of the other symptoms; empty without symptoms."""
    if not found:
        return ""
    first, *others = found
    also = f"; also: {', '.join(others)}" if others else ""
    return f"{found[first]} (docs/not-learning.md#{first}){also}"


def after_warm_start(line: Mapping[str, float]) -> str:
    """A sentence on what the policy learned in the warm start, judged by the first optimizer step."""
    reward, unsolved = line["reward/avg_raw_reward"], line.get("reward/groups_all_zero", 0.0)
    nothing = "; it solves nothing: raise model.warm_start.steps, or right_fraction" if unsolved >= 0.8 else ""
    return f"after the warm start the reward is {reward:.3g}, and 0 in {unsolved:.0%} of the groups{nothing}"


def _mean(lines: Collection[Mapping[str, float]], key: str) -> float | None:
    """The mean of a metric; None if there are fewer than `WINDOW` lines, or most lines lack the metric."""
    values = [line[key] for line in lines if line.get(key) is not None]
    return sum(values) / len(values) if len(lines) == WINDOW and len(values) > WINDOW // 2 else None


FRESH = "policy/by_staleness/0"
"""Prefix of the keys of metrics about the tokens that the newest policy sampled."""

LARGEST_FRACTION = 0.1
"""Maximum fraction of the newest policy's tokens that may differ by more than the tolerance."""

MIN_TOKENS = 50
"""An optimizer step with fewer tokens of the newest policy is not checked."""

STEPS_IN_A_ROW = 3
"""Number of consecutive optimizer steps in which engine and trainer must disagree before the run ends."""


class LogprobCheck:
    """Compares the engine's and the trainer's log-probabilities of tokens that the newest policy sampled, over several
    successive optimizer steps.

    With the same weights they differ only by rounding. In bfloat16, rounding has rare outliers, which would dominate a
    mean. So the check uses the fraction of tokens that differ by more than a tolerance. The tolerance depends on the
    type:

        differences 0.01 0.02 4.0 0.01 ... (100 tokens), tolerance 0.1   ->   0.01: rounding
        differences 0.2  0.3  0.1 0.25 ... (100 tokens), tolerance 0.1   ->   0.9: other weights
    """

    def __init__(self, weights: WeightsConfig) -> None:
        self._weights = weights
        self._disagreed = 0
        self._agreed_at: int | None = None

    def mismatch(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """The reason to end the run after optimizer step `step`; None if there is no reason, or if `weights.verify` is
        off."""
        if not self._weights.verify or metrics.get(f"{FRESH}/tokens", 0) < MIN_TOKENS:
            return None
        differing = metrics[f"{FRESH}/differing_fraction"]
        if differing <= LARGEST_FRACTION:
            self._disagreed, self._agreed_at = 0, step
            return None
        self._disagreed += 1
        if self._disagreed < STEPS_IN_A_ROW:
            return None
        root_mean_square = math.sqrt(2 * max(metrics[f"{FRESH}/kl"], 0.0))
        return (
            f"engine and trainer disagree about the newest policy in {self._disagreed} steps in a row: {differing:.0%} "
            f"of {metrics[f'{FRESH}/tokens']:.0f} tokens differ by more than rounding (root mean square "
            f"about {root_mean_square:.2g} nats). {self._cause()}"
        )

    def _cause(self) -> str:
        if self._agreed_at is None:
            return (
                "They have not agreed in any step, so look at what differs between them from the start: model.dtype, "
                "generator.engine_options (quantization, rope scaling), sampling settings that change the distribution"
            )
        return f"They agreed until step {self._agreed_at}: the engine does not serve what the trainer sent"
