"""On-policy distillation of a small teacher into the quick start's model: how far the reverse KL divergence falls.

    python -m benchmarks.distill
    python -m benchmarks.distill --steps 60 --seed 1 algorithm.teacher.mode=kl

Teacher and student begin as the same small model. The teacher is warm-started on demonstrations that all solve the
task, the student as in the quick start. Then the student samples, the teacher gives the log-probability of each sampled
token, and nothing else is learned: every reward is 0. There is neither Ray nor vLLM, and every token is fresh.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.in_process import rounds, warm_started
from service.config import Config, load
from service.handoff.ledger.scores import CompleteGroup, sampled_tokens
from service.run.inputs import Prepared
from service.scorers.teacher_logprobs import taught

RECIPE = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
WINDOW = 5
"""Mini-batches over which the divergence is averaged, at the beginning and at the end."""


class FrozenModel:
    """A teacher in this process."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    async def logprobs(self, token_ids: list[int]) -> Sequence[float | None]:
        """The log-probability of each token given those before it."""
        ids_T = torch.tensor(token_ids)
        logits_TV = self._model(input_ids=ids_T[None]).logits[0, :-1]
        return [None, *logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0].tolist()]


async def divergences(
    config: Config, steps: int, prepared: Prepared, student: Path, teacher: FrozenModel
) -> list[float]:
    """For each mini-batch, the mean log-ratio of student to teacher over the sampled tokens, before its step."""
    found = list[float]()
    async with aclosing(rounds(config, steps, prepared, student)) as training:
        async for groups in training:
            ratios = []
            for place, group in enumerate(groups):
                groups[place], ratio_M = await taught_group(group, teacher)
                ratios.append(ratio_M)
            found.append(float(np.concatenate(ratios).mean()))
            print(f"step {len(found) - 1}: {found[-1]:.4f} nats a token", file=sys.stderr)
    return found


async def taught_group(group: CompleteGroup, teacher: FrozenModel) -> tuple[CompleteGroup, np.ndarray]:
    """The group with the teacher's log-probabilities and without rewards; and the log-ratios of its sampled tokens."""
    steps = group.steps
    teacher_N = np.full(len(steps.token_ids_N), np.nan, np.float32)
    sampled = sampled_tokens(steps)
    teacher_N[sampled] = await taught(steps, teacher.logprobs)
    steps = replace(steps, teacher_logprobs_N=teacher_N, reward_K=np.zeros_like(steps.reward_K))
    ends = replace(group.ends, reward_E=np.zeros_like(group.ends.reward_E))
    return group._replace(steps=steps, ends=ends), steps.logprobs_N[sampled] - teacher_N[sampled]


def main() -> None:
    """Distil, and print the divergence at the beginning and at the end as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distill", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="settings, as for baton run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    own = ["trainer.ranks=1", "buffer.lookahead=0", f"run.seed={arguments.seed}", "algorithm.teacher={}"]
    own += [
        "scorers.made={kind: teacher, use: 'benchmarks.distill:FrozenModel'}",
        "algorithm.filter_zero_variance=false",
    ]
    own += arguments.overrides
    with tempfile.TemporaryDirectory() as folder:
        config = load([RECIPE], own).config
        prepared, student = warm_started(config, Path(folder) / "student")
        skilled = load([RECIPE], [*own, "model.warm_start.right_fraction=1.0"]).config
        teacher = FrozenModel(warm_started(skilled, Path(folder) / "teacher")[1])
        found = asyncio.run(divergences(config, arguments.steps, prepared, student, teacher))
    first, last = statistics.fmean(found[:WINDOW]), statistics.fmean(found[-WINDOW:])
    print(json.dumps({"steps": len(found), "first": first, "last": last, "last over first": last / first}))


if __name__ == "__main__":
    main()
