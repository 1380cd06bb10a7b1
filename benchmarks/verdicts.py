"""How often a verifier that learns together with its solver is right, against the best constant verdict.

    python -m benchmarks.verdicts

The recipe `configs/solver_verifier_tiny.yaml` in one process; a line of JSON for each `SHOWN` mini-batches.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import torch

from baton.examples.solver_verifier import RIGHT, WRONG
from benchmarks.in_process import rounds, warm_started
from service.config import Config, load
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.steps.tables import step_objects
from service.rollout.chat.chat import Chat, load_chat

RECIPE = Path(__file__).parent.parent / "configs" / "solver_verifier_tiny.yaml"
SHOWN = 20
"""Mini-batches per line."""


class Verdict(NamedTuple):
    """One turn of the verifier."""

    is_right: bool
    shown_right: bool
    """Whether the answer that it read was right."""


def verdicts(groups: Sequence[CompleteGroup], chat: Chat) -> list[Verdict]:
    """The verdicts in these groups; a response that is neither of the two words does not count."""
    said = [(chat.text(step.response_ids).split(), step.reward > 0) for g in groups for step in step_objects(g.steps)]
    return [
        Verdict(rewarded, (words == [RIGHT]) == rewarded) for words, rewarded in said if words in ([RIGHT], [WRONG])
    ]


async def train(config: Config, steps: int, folder: Path) -> None:
    """Train, and print how often verdicts and answers are right."""
    prepared, started = warm_started(config, folder)
    chat, found, solved = load_chat(started, config.generator), list[Verdict](), list[float]()
    async with aclosing(rounds(config, steps, prepared, started)) as batches:
        number = 0
        async for groups in batches:
            number += 1
            found += verdicts(groups, chat)
            solved += [reward for group in groups for reward in group.ends.reward_E.tolist()]
            if number % SHOWN == 0:
                right = statistics.fmean(v.is_right for v in found)
                shown = statistics.fmean(v.shown_right for v in found)
                line = {"steps": number, "verdicts": right, "best_constant": max(shown, 1 - shown)}
                print(json.dumps(line | {"solver": statistics.fmean(solved)}), flush=True)
                found, solved = [], []


def main() -> None:
    """Train the recipe, and print what was right as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts", description=main.__doc__)
    parser.add_argument("--steps", type=int, default=200, help="mini-batches")
    parser.add_argument("overrides", nargs="*", help="settings, as for baton run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load([RECIPE], ["trainer.ranks=1", "buffer.lookahead=0", *arguments.overrides]).config
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(train(config, arguments.steps, Path(folder)))


if __name__ == "__main__":
    main()
