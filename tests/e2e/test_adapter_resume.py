"""A run that trains an adapter, killed in its parts and as a whole, has the history of one that nothing happened to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Drive
from tests.e2e.test_recovery import kill
from tests.e2e.verdict import lines_of

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

STEPS = 9
SETTINGS = [
    "model.lora.rank=4",
    "model.warm_start.steps=200",
    "env.name=tests.e2e.scripted_lookup:Lookup",
    "env.trusted_modules=[tests.e2e.scripted_lookup]",
    "buffer.lookahead=0",
    "buffer.order=strict",
    "weights.verify=true",
    "trainer.lr=3e-3",
    "trainer.warmup_steps=0",
    "trainer.mini_batch_size=8",
    "trainer.checkpoint_every=3",
    "generator.concurrent_groups=8",
    "metrics.port=0",
    f"run.max_steps={STEPS}",
]
SAME = (
    "reward/avg_raw_reward",
    "generate/avg_num_tokens",
    "generate/avg_num_turns",
    "tokens/loss",
    "policy/grad_norm",
    "policy/policy_entropy",
    "policy/policy_loss",
)
"""What a step's history consists of."""


def history(folder: Path) -> list[dict[str, float]]:
    return [{key: line[key] for key in SAME} for line in lines_of(folder)]


def same_history(whole: Path, killed: Path, steps: int) -> list[dict[str, float]]:
    """The history of both runs, which is the same."""
    expected, found = history(whole), history(killed)
    assert len(expected) == len(found) == steps
    for step, (before, after) in enumerate(zip(expected, found, strict=True), 1):
        assert after == pytest.approx(before, rel=1e-3, abs=1e-4), f"step {step}"
    return expected


def test_a_killed_and_resumed_run_has_the_history_of_the_uninterrupted_one(drive: Drive, tmp_path: Path) -> None:
    whole = drive(SETTINGS)
    whole.finish()

    killed = drive([*SETTINGS, f"run.dir={tmp_path / 'killed'}"])
    killed.folder = tmp_path / "killed" / "quickstart"
    killed.until_step(4)
    kill(killed, "ray::TrainerRank")
    killed.until("the trainer restarts from step")
    killed.until_step(5)
    kill(killed, "VLLM::EngineCore")
    killed.until("generator-0 is back")
    killed.until_step(7)
    killed.kill()
    resumed = drive(["--resume", str(killed.folder)])
    resumed.folder = killed.folder
    resumed.finish()

    expected = same_history(whole.folder, killed.folder, STEPS)
    assert len({line["reward/avg_raw_reward"] for line in expected}) > 1, "the policy does not change"
