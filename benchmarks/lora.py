"""The quick start with all weights trained and with an adapter: how much of the gain in success the adapter reaches.

    python -m benchmarks.lora
    python -m benchmarks.lora --seeds 0 --rank 8 --lr 3e-3
    python -m benchmarks.lora --seeds 0 model.warm_start.steps=300

The quick start's task, model, settings and number of steps in one process, as in `benchmarks.credit`. Both variants
have a longer warm start than the quick start's 300 steps: after 300 steps much is left to learn in the embedding,
which an adapter does not train. The gain is the mean success of the last mini-batches minus that of the first one,
which both variants sample alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from contextlib import aclosing
from pathlib import Path

import torch

from benchmarks.in_process import rounds, warm_started
from service.config import Config, LoraConfig, load
from service.handoff.steps.tables import end_objects
from service.run.inputs import Prepared

RECIPE = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
WINDOW = 10
"""Mini-batches over which success at the end is averaged."""
BAR = 0.9
WARM_START = "model.warm_start.steps=1000"


async def gain(config: Config, prepared: Prepared, model_folder: Path) -> float:
    """Mean success of the last `WINDOW` mini-batches minus that of the first."""
    successes = list[float]()
    how = "whole" if config.model.lora is None else f"rank {config.model.lora.rank}"
    async with aclosing(rounds(config, config.run.max_steps, prepared, model_folder)) as training:
        async for groups in training:
            successes.append(statistics.fmean(end.reward for group in groups for end in end_objects(group.ends)))
            print(f"{how}, seed {config.run.seed}, step {len(successes) - 1}: {successes[-1]:.3f}", file=sys.stderr)
    return statistics.fmean(successes[-WINDOW:]) - successes[0]


def main() -> int:
    """Train both ways with every seed, and print the gains and their ratio as JSON; 1 if a ratio is below the bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora", description=main.__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of the adapter")
    parser.add_argument("overrides", nargs="*", help="settings, as for baton run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gains: dict[int, tuple[float, float]] = {}
    for seed in arguments.seeds:
        own = ["trainer.ranks=1", "buffer.lookahead=0", WARM_START, *arguments.overrides, f"run.seed={seed}"]
        config = load([RECIPE], own).config
        adapter = config.model_copy(
            update={
                "model": config.model.model_copy(update={"lora": LoraConfig(rank=arguments.rank)}),
                "trainer": config.trainer.model_copy(update={"lr": arguments.lr}),
            }
        )
        with tempfile.TemporaryDirectory() as folder:
            started = warm_started(config, Path(folder))
            gains[seed] = asyncio.run(gain(config, *started)), asyncio.run(gain(adapter, *started))
    ratios = {seed: of_adapter / whole for seed, (whole, of_adapter) in gains.items()}
    print(json.dumps({"gains": gains, "adapter over whole": ratios, "bar": BAR}))
    return 0 if min(ratios.values()) >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
