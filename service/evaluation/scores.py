"""Scores of an evaluation: computed from sampled trajectories of fixed prompts, which are never sent to the buffer.

rewards of one prompt's 4 samples  1 0 0 1      avg_score 0.5
pass_at_1 = 0.5, pass_at_2 = 1 - C(2,2)/C(4,2) = 5/6, pass_at_4 = 1
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from service.files import output_file
from service.handoff.steps.values import FAILURES

MEANS = ("avg_score", "avg_turns", "avg_tokens", "truncated_ratio")
SAMPLE_SEED = 0
"""Seed of the random choice of prompts that evaluations play; equal in all runs."""


@dataclass(frozen=True, slots=True)
class EvalTrajectory:
    """The result of one trajectory of an evaluation."""

    prompt_uid: str
    reward: float
    n_turns: int
    n_tokens: int
    """Number of tokens that the policy sampled."""
    stop_reason: str
    """Why the trajectory ended. If the engine or the environment failed, the trajectory is left out of the scores."""
    n_truncated: int = 0
    """Number of turns whose response was cut off at the length limit."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of one evaluation set. Lost trajectories are counted, but left out of every mean."""

    name: str
    scores: Mapping[str, float]
    """By name; `truncated_ratio`: the fraction of the turns whose response was cut off at the length limit."""
    n_prompts: int
    n_trajectories: int
    n_lost: int
    stop_reasons: Mapping[str, int]

    def record(self) -> dict[str, Any]:
        """All scores and counts by name, for one JSON object."""
        return {
            "set": self.name,
            **self.scores,
            "prompts": self.n_prompts,
            "trajectories": self.n_trajectories,
            "lost_trajectories": self.n_lost,
            "stop_reasons": dict(self.stop_reasons),
        }

    def metrics(self) -> dict[str, float]:
        """The scores by the names under which trackers get them, `eval/<set>/<name>`."""
        scores = {**self.scores, "lost_trajectories": float(self.n_lost)}
        return {f"eval/{self.name}/{name}": value for name, value in scores.items()}


class EvalShard(NamedTuple):
    """The rows of an evaluation set that one engine plays: every `of`-th row, from row `number` on."""

    number: int = 0
    of: int = 1
    most: int | None = None
    """Maximum number of rows of the whole set that are played; None: all rows."""

    def rows(self, n: int) -> Sequence[int]:
        """The row numbers of this shard, for a set of `n` rows. If `n` exceeds `most`, the shards together have only
        `most` random rows, which are the same in every evaluation.

        The rows are random because a set may be sorted, so that its first rows might not represent the whole set.
        """
        if self.most is None or n <= self.most:
            return range(self.number, n, self.of)
        return sorted(random.Random(SAMPLE_SEED).sample(range(n), self.most))[self.number :: self.of]


def summarize(name: str, played: Sequence[EvalTrajectory]) -> Evaluation:
    """The scores of a set: means over trajectories, and for `pass_at` means over prompts. A sample passes if its reward
    is above 0."""
    kept = [trajectory for trajectory in played if trajectory.stop_reason not in FAILURES]
    rewards: dict[str, list[float]] = {}
    for trajectory in kept:
        rewards.setdefault(trajectory.prompt_uid, []).append(trajectory.reward)
    scores = {
        "avg_score": _mean([trajectory.reward for trajectory in kept]),
        **_pass_at(list(rewards.values())),
        "avg_turns": _mean([trajectory.n_turns for trajectory in kept]),
        "avg_tokens": _mean([trajectory.n_tokens for trajectory in kept]),
        "truncated_ratio": sum(of.n_truncated for of in kept) / max(sum(of.n_turns for of in kept), 1),
    }
    return Evaluation(
        name,
        scores,
        n_prompts=len({trajectory.prompt_uid for trajectory in played}),
        n_trajectories=len(played),
        n_lost=len(played) - len(kept),
        stop_reasons=Counter(trajectory.stop_reason for trajectory in played),
    )


def pass_at(k: int, n: int, passed: int) -> float:
    """Probability that at least one of `k` samples passes, if they are drawn without replacement from `n` samples of
    which `passed` pass.

    This is the unbiased estimator of pass@k by Chen et al. 2021 (arXiv:2107.03374, section 2.1).
    """
    return 1.0 - comb(n - passed, k) / comb(n, k)


def _pass_at(rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and for the minimum number of samples that any prompt kept."""
    fewest = min(map(len, rewards), default=0)
    ks = sorted({1 << i for i in range(fewest.bit_length())} | {fewest}) if fewest else []
    passed = [(len(of), sum(reward > 0 for reward in of)) for of in rewards]
    return {f"pass_at_{k}": _mean([pass_at(k, *of) for of in passed]) for k in ks}


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def table(evaluations: Sequence[Evaluation]) -> str:
    """The results as a table: a header line, then one line per evaluation set, with aligned columns."""
    names = {name for of in evaluations for name in of.scores if name.startswith("pass_at_")}
    ks = sorted(names, key=lambda name: int(name.rpartition("_")[2]))
    passes = (name.replace("_at_", "@") for name in ks)
    head = ("set", "prompts", "trajectories", "score", *passes, "turns", "tokens", "cut", "lost")
    lines = [head]
    for of in evaluations:
        passed = (f"{of.scores[k]:.3f}" if k in of.scores else "-" for k in ks)
        score, turns, tokens, cut = (of.scores[name] for name in MEANS)
        means = (f"{score:.3f}", *passed, f"{turns:.2f}", f"{tokens:.1f}")
        ends = (f"{cut:.1%}", str(of.n_lost))
        lines.append((of.name, str(of.n_prompts), str(of.n_trajectories), *means, *ends))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def write_output(file: Path, text: str) -> None:
    """Write results to a user's file; see `output_file`."""
    with output_file(file) as path:
        path.write_text(text, encoding="utf-8")
