"""Baton and TRL's `GRPOTrainer` on the quick start's task, in turns: seconds and CPU seconds a step, final reward.

Both begin with the same weights, play the same task on the same cores with the same settings, and take the same number
of optimizer steps. The second part is the same with an environment whose calls take time. The first steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import own_environment
from benchmarks.in_process import warm_started
from benchmarks.peer.baton_side import trained
from service.config import load

FOLDER = own_environment.ROOT / "build" / "bench-peer"
RECIPE = own_environment.ROOT / "configs" / "quickstart.yaml"
FIRST = 5
"""Steps that do not count."""
LAST = 10
"""Steps whose mean reward is the final one."""
MAX_DIFFERENCE = 1e-3
"""Between a log-probability of TRL's engine and of its trainer, both in float32."""
PARTS = {
    "calm": [],
    "slow": ["env.name=benchmarks.peer.slow_lookup:SlowLookup", "env.trusted_modules=[benchmarks.peer.slow_lookup]"],
}
"""The settings of each part, besides those of the quick start."""


def compare(part: str, seed: int, steps: int, cores: int) -> dict[str, Any]:
    """One run of each; figures a step."""
    settings = [*PARTS[part], f"run.max_steps={steps}", f"run.seed={seed}"]
    with tempfile.TemporaryDirectory(prefix="bench-peer-") as name:
        folder = Path(name)
        config = load([RECIPE], settings).config
        torch.set_num_threads(1)  # on busy cores several wait for each other
        prepared, model = warm_started(config, folder)
        (folder / "config.json").write_text(config.model_dump_json())
        sides = {
            "baton": lambda: baton([*settings, f"model.path={model}"], folder),
            "trl": lambda: trl(folder / "config.json", model, prepared.tasks_file, folder),
        }
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
        order = list(sides) if seed % 2 == 0 else list(reversed(sides))
        return {"part": part, "seed": seed, "steps": steps} | {side: sides[side]() for side in order}


def baton(settings: list[str], folder: Path) -> dict[str, Any]:
    """Figures of a run of Baton."""
    words = ["--config", str(RECIPE), "model.make=null", "model.warm_start=null", "metrics.port=0", *settings]
    looks, rewards = trained(words, folder)
    begin = next(look for look in looks if look.step >= FIRST)
    end = next(look for look in looks if look.step >= len(rewards) - 1)
    counted = end.step - begin.step
    by_part = {part: (end.cpu[part] - begin.cpu.get(part, 0.0)) / counted for part in end.cpu}
    return {
        "seconds": (end.wall - begin.wall) / counted,
        "cpu_seconds": sum(by_part.values()),
        "reward": statistics.fmean(rewards[-LAST:]),
        "by_part": by_part,
    }


def trl(config: Path, model: Path, tasks: Path, work: Path) -> dict[str, Any]:
    """Figures of a run of TRL."""
    python = own_environment.own_python(FOLDER, Path(__file__).parent / "peers.txt", None)
    command = [str(python), "-m", "benchmarks.peer.trl_side", *map(str, (config, model, tasks, work))]
    subprocess.run(command, cwd=own_environment.ROOT, check=True)
    found = json.loads((work / "found.json").read_text())
    if not found["difference"] <= MAX_DIFFERENCE:
        raise SystemExit(f"TRL's engine and trainer differ by {found['difference']}: its weights are not in step")
    looks = found["looks"]
    begin, end = looks[FIRST - 1], looks[-2]
    counted = end["step"] - begin["step"]
    return {
        "seconds": (end["wall"] - begin["wall"]) / counted,
        "cpu_seconds": (end["cpu"] - begin["cpu"]) / counted,
        "reward": statistics.fmean(look["reward"] for look in looks[-LAST:]),
    }


def table(found: list[dict[str, Any]]) -> str:
    """The means over all seeds of each part."""
    lines = ["| environment | | s a step | CPU s a step | final reward |", "|---|---|---|---|---|"]
    for part in PARTS:
        if some := [each for each in found if each["part"] == part]:
            for side in ("trl", "baton"):
                means = [statistics.fmean(e[side][key] for e in some) for key in ("seconds", "cpu_seconds", "reward")]
                lines.append(f"| {part}, {len(some)} seeds | {side} | " + " | ".join(f"{m:.3f}" for m in means) + " |")
            ratio = statistics.median(each["baton"]["seconds"] / each["trl"]["seconds"] for each in some)
            lines.append(f"| | Baton's seconds over TRL's, median | {ratio:.2f} | | |")
            shares = {name: statistics.fmean(e["baton"]["by_part"].get(name, 0.0) for e in some) for name in NAMES}
            lines.append("CPU ms a step: " + ", ".join(f"{name} {1000 * s:.0f}" for name, s in shares.items()))
    return "\n".join(lines)


NAMES = ("engine core", "generator", "ranks", "buffer", "driver", "the rest")


def main() -> int:
    """Run what was asked for, print the table over everything in the file of figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer", description=__doc__)
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each run")
    parser.add_argument("--cores", type=int, default=2, help="cores that each side may use")
    parser.add_argument("--json", type=Path, default=FOLDER / "figures.json", help="takes the figures of each pair")
    arguments = parser.parse_args()
    own_environment.own_python(FOLDER, Path(__file__).parent / "peers.txt", None)
    found = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    for part in PARTS if arguments.part == "all" else (arguments.part,):
        for seed in arguments.seeds:
            found = [each for each in found if (each["part"], each["seed"]) != (part, seed)]
            found.append(compare(part, seed, arguments.steps, arguments.cores))
            arguments.json.write_text(json.dumps(found, indent=2))
            print(json.dumps(found[-1]), flush=True)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
