"""A pretrained model learns a game of several turns on one GPU, which a rank and an engine share."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.figures import Range, line
from benchmarks.gpu.parts import ROOT, Give, Skipped

RUNS = {
    "cuda": ("smollm2_guess_gpu", ["run.max_steps=30"]),
    "cpu": (
        "quickstart",
        ["run.max_steps=2", "trainer.ranks=1", "model.warm_start.steps=5"],
    ),
}
"""Configuration and settings by device; on a CPU the quick start runs instead."""
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
ALONE = ["metrics.port=0", "run.stop_grace=5"]
REWARD, STEP = "reward/avg_raw_reward", "timing/step"
RISE = Range(0.1, 1.0)
"""Expected rise of the mean reward. On two CPU cores it rose from 0.02 to 0.33 in 18 steps with a fifth of the
trajectories."""


def measure(device: str, give: Give) -> None:
    """Measure the rewards of the first and the last fifth of the steps, and the time of a step."""
    name, settings = RUNS[device]
    if device == "cuda" and not MODEL.is_dir():
        raise Skipped(f"models/{MODEL.name} is not there: scripts/real_model.py makes it, with a network")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "service", "run", "--config", f"configs/{name}.yaml", f"run.dir={folder}"]
        done = subprocess.run(
            [*command, *ALONE, *settings], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        print(done.stdout)
        if done.returncode:
            raise RuntimeError(f"baton run: {(done.stdout.strip().splitlines() or ['it printed nothing'])[-1]}")
        steps = [json.loads(text) for text in (Path(folder) / name / "metrics.jsonl").read_text().splitlines()]
    fifth = max(1, len(steps) // 5)
    first, last = (statistics.fmean(step[REWARD] for step in some) for some in (steps[:fifth], steps[-fifth:]))
    give(line("reward, last fifth less first", last - first, "", RISE, f"{first:.2f} to {last:.2f}"))
    give(line("step", statistics.median(step[STEP] for step in steps), "s"))
