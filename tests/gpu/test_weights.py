"""Weights within one GPU: short runs that end when engine and trainer disagree about a token."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("ray")
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
SHORT = ["run.max_steps=3", "trainer.ranks=1", "generator.engines=1", "generator.gpu_memory_utilization=0.4"]
SHORT += ["model.warm_start.steps=5", "metrics.port=0", "weights.verify=true"]
SHORT += ["run.trajectories_per_step=64"]
ADAPTER = ["model.lora={}", "model.dtype=bfloat16"]


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


@pytest.mark.timeout(540)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_generator_and_a_rank_that_are_killed_come_back_to_the_gpu(tmp_path: Path) -> None:
    assert_killed_ones_come_back(tmp_path, "weights.transport=ipc")


def assert_killed_ones_come_back(folder: Path, *settings: str) -> None:
    """Each is killed amid a step, with its children; memory that it had on a GPU is free for the next process."""
    command = [sys.executable, "-m", "service", "run", "--config", "configs/quickstart.yaml", f"run.dir={folder}"]
    command += [*SHORT, "run.max_steps=8", "trainer.checkpoint_every=2", *settings]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    victims, said = [("step    2/", "ray::Generator"), ("step    5/", "ray::TrainerRank")], list[str]()
    for line in run.stdout or ():
        said.append(line)
        if victims and line.startswith(victims[0][0]):
            _, name = victims.pop(0)
            for process in psutil.Process(run.pid).children(recursive=True):
                if process.is_running() and "".join(process.cmdline()).startswith(name):
                    process.kill()
    assert run.wait(60) == 0 and not victims, "".join(said)
    assert json.loads((folder / "quickstart" / "summary.json").read_text())["steps"] == 8
    logs = "".join(log.read_text() for log in (folder / "quickstart" / "logs").glob("*.log"))
    assert "Free memory" not in logs, "vLLM's check at the start of an engine"
