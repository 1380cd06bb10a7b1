"""Weights within one GPU: short runs that end when engine and trainer disagree about a token."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
SHORT = ["run.max_steps=3", "trainer.ranks=1", "generator.engines=1", "generator.gpu_memory_utilization=0.4"]
SHORT += ["model.warm_start.steps=5", "metrics.port=0", "weights.verify=true"]
SHORT += ["run.trajectories_per_step=64"]
ADAPTER = ["model.lora={}", "model.dtype=bfloat16", "weights.verify_tolerance=0.1"]


@pytest.mark.timeout(540)
@pytest.mark.parametrize("adapter", [[], ADAPTER], ids=["weights", "adapter"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_engine_and_trainer_agree_after_weights_were_shared_on_a_gpu(tmp_path: Path, adapter: list[str]) -> None:
    command = [sys.executable, "-m", "service", "run", "--config", "configs/quickstart.yaml", f"run.dir={tmp_path}"]
    command += [*SHORT, *adapter, "weights.transport=ipc"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "did not take the weights" not in said.stdout
    assert json.loads((tmp_path / "quickstart" / "summary.json").read_text())["steps"] == 3
    kept = [json.loads(line) for line in (tmp_path / "quickstart" / "trajectories.jsonl").read_text().splitlines()]
    versions = {version for record in kept for step in record["steps"] for _, version in step["versions"]}
    assert versions & {"1.1", "1.2"}, "tokens that weights sent during the run sampled"
