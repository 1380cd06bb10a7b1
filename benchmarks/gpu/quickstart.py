"""A short run of the quick start: a rank and an engine share the GPU where there is only one."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.gpu.parts import ROOT, Give

LENGTH = {
    "cuda": ["run.max_steps=30"],
    "cpu": ["run.max_steps=2", "model.warm_start.steps=5", "model.warm_start.probe_prompts=0"],
}
ALONE = ["trainer.ranks=1", "metrics.port=0", "run.stop_grace=5"]
SHARED = ["weights.transport=ipc", "generator.gpu_memory_utilization=0.35"]
"""As `make quickstart` sets them on one GPU."""
KEYS = {
    "step_s": "timing/step",
    "reward": "reward/avg_raw_reward",
    "kl": "policy/by_staleness/0/kl",
    "sync_s": "timing/sync_weights",
}


def measure(device: str, give: Give) -> None:
    """Seconds in all and a step, the rewards of the first and the last steps, and what weight updates took."""
    started = time.monotonic()
    steps = steps_of_run([*LENGTH[device], *(SHARED if torch.cuda.device_count() == 1 else [])])
    seconds = time.monotonic() - started
    quarter = max(1, len(steps) // 4)
    for name, some in (("first quarter", steps[:quarter]), ("last quarter", steps[-quarter:])):
        found = {key: [step[long] for step in some if long in step] for key, long in KEYS.items()}
        means = {key: statistics.fmean(values) for key, values in found.items() if values}
        give({"steps": name, "run_s": seconds, **means})


def steps_of_run(settings: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of each step of the quick start with one rank and these settings."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "service", "run", "--config", "configs/quickstart.yaml", f"run.dir={folder}"]
        words = [*command, *ALONE, *settings]
        done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout)
        if done.returncode:
            raise RuntimeError(f"baton run: {(done.stdout.strip().splitlines() or ['it printed nothing'])[-1]}")
        lines = (Path(folder) / "quickstart" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
