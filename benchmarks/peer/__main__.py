"""Baton and TRL's `GRPOTrainer` on the same task, in turn: seconds and CPU seconds per step, and reward.

All sides begin with the same weights, play the same task on the same cores with the same settings, and take the same
number of optimizer steps. There are three parts: the quick start with its small model, the same with slow calls of the
environment, and a pretrained model on a game of several turns (`make real` prepares it). The first steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from actors.driver.prepare import prepare
from benchmarks import own_environment
from benchmarks.peer.baton_side import Look, trained
from service.config import Config, load
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.learn.supervised import SupervisedSteps
from service.run.preparing.inputs import Prepared, demonstrations

FOLDER = own_environment.ROOT / "build" / "bench-peer"
PEERS = Path(__file__).parent / "peers.txt"
CONFIGS = own_environment.ROOT / "configs"
CORES = 2
"""Number of cores that each side may use."""
LAST = 10
"""The number of last steps whose mean reward is the final reward."""
MAX_DIFFERENCE = 1e-3
"""Maximum difference between the log-probabilities of TRL's engine and of its trainer, both in float32."""


class Part(NamedTuple):
    """What is trained by Baton and by TRL."""

    recipe: str
    settings: Sequence[str]
    """Settings that override the recipe on all sides."""
    steps: int
    first: int
    """The number of first steps, which do not count."""
    threads: int
    """Threads of TRL's process; the small model's operations are so small that a step takes 2.35 s with two threads."""
    made: bool
    """Whether the recipe creates its model and warm-starts it."""


NO_EVALUATION = ("data.eval_every=0", "data.eval_make_rows=null")
SLOW = ("env.name=benchmarks.peer.slow_lookup:SlowLookup", "env.trusted_modules=[benchmarks.peer.slow_lookup]")
PARTS = {
    "calm": Part("quickstart.yaml", (), 100, 5, 1, True),
    "slow": Part("quickstart.yaml", SLOW, 100, 5, 1, True),
    "game": Part("smollm2_guess.yaml", NO_EVALUATION, 4, 1, 2, False),
}
NAMES = {"baton": "Baton", "trl": "TRL with vLLM in its process"}


def compare(part: Part, side: str, seed: int, steps: int) -> dict[str, Any]:
    """Figures per step of one side."""
    settings = [*part.settings, f"run.max_steps={steps}", f"run.seed={seed}"]
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as name:
        folder = Path(name)
        config = load([CONFIGS / part.recipe], settings).config
        torch.set_num_threads(1)  # on busy cores several threads would wait for each other
        prepared, model = prepare(config, folder), config.model.path
        if part.made:
            model = warm_started(config, prepared, folder / "started")
        assert model is not None
        (folder / "config.json").write_text(config.model_dump_json())
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        if side == "baton":
            return baton(part, [*settings, f"model.path={model}"], folder)
        return trl(part, folder / "config.json", model, prepared.tasks_file, folder)


def warm_started(config: Config, prepared: Prepared, folder: Path) -> Path:
    """Write the model as it is after its warm start; returns the folder."""
    learner = Learner(LearnSettings.of(config), prepared.model_folder, torch.device("cpu"), 0, 1)
    rows = demonstrations(config.model, config.env, config.generator, config.run.seed, prepared.model_folder)
    SupervisedSteps(LearnSettings.of(config), learner.policy).warm_start(rows)
    learner.export(folder)
    return folder


def baton(part: Part, settings: list[str], folder: Path) -> dict[str, Any]:
    """Figures of a run of Baton."""
    made = ["model.make=null", "model.warm_start=null"] if part.made else []
    words = ["--config", str(CONFIGS / part.recipe), *made, "metrics.port=0", *settings]
    looks, lines = trained(words, folder)
    # the last step does not count: nothing is generated for a step after it
    begin, end = (next(look for look in looks if look.step >= step) for step in (part.first, len(lines) - 1))
    return per_step(begin, end, [line["reward/avg_raw_reward"] for line in lines])


def per_step(begin: Look, end: Look, rewards: Sequence[float]) -> dict[str, Any]:
    """Figures from two looks, and of the reward of each step."""
    step, wall, cpu = np.subtract(end, begin)
    return {"seconds": wall / step, "cpu_seconds": cpu / step, "reward": statistics.fmean(rewards[-LAST:])}


def trl(part: Part, config: Path, model: Path, tasks: Path, work: Path) -> dict[str, Any]:
    """Figures of a run of TRL."""
    python = own_environment.own_python(FOLDER, PEERS, None)
    words = map(str, (config, model.resolve(), tasks, work, part.threads))
    command = [str(python), "-m", "benchmarks.peer.trl_side", *words]
    subprocess.run(command, cwd=own_environment.ROOT, check=True)
    found = json.loads((work / "found.json").read_text())
    if not found["difference"] <= MAX_DIFFERENCE:
        raise SystemExit(f"TRL's engine and trainer differ by {found['difference']}: its weights are not in step")
    looks = [Look(*look) for look in found["looks"]]
    return per_step(looks[part.first - 1], looks[-2], found["rewards"])


def table(found: list[dict[str, Any]]) -> str:
    """A table with the means over all seeds for each part and side."""
    lines = ["| task | | s a step | CPU s a step | reward of the last steps |", "|---|---|---|---|---|"]
    for name in PARTS:
        of_side = {side: {e["seed"]: e for e in found if (e["part"], e["side"]) == (name, side)} for side in NAMES}
        for side, by_seed in of_side.items():
            if by_seed:
                means = [statistics.fmean(e[k] for e in by_seed.values()) for k in ("seconds", "cpu_seconds", "reward")]
                figures = " | ".join(f"{mean:.3f}" for mean in means)
                lines.append(f"| {name}, seeds {sorted(by_seed)} | {NAMES[side]} | {figures} |")
        ours, theirs = of_side.values()
        if ratios := [f"{ours[seed]['seconds'] / theirs[seed]['seconds']:.2f}" for seed in ours.keys() & theirs]:
            lines.append(f"| | Baton's seconds over TRL's: {', '.join(ratios)} | | | |")
    return "\n".join(lines)


def main() -> int:
    """Run the requested parts, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    arguments = parser.parse_args()
    own_environment.own_python(FOLDER, PEERS, None)
    found = list[dict[str, Any]]()
    for name in PARTS if arguments.part == "all" else (arguments.part,):
        steps = arguments.steps or PARTS[name].steps
        for seed in arguments.seeds:
            for side in NAMES if seed % 2 == 0 else reversed(NAMES):
                figures = compare(PARTS[name], side, seed, steps)
                found.append({"part": name, "seed": seed, "side": side, "steps": steps} | figures)
                print(json.dumps(found[-1]), flush=True)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
