"""Runs that end, lose parts, or lose their machine and its disk, and go on as if nothing had been."""

import json
import shutil
from pathlib import Path

import pytest

from service.config import load
from service.config.core_settings import batch_settings, message_limits
from service.store.objects import Objects, stored_steps
from tests.e2e.conftest import QUICK, Drive, Driver
from tests.recorded import replayed
from tests.s3_server import BUCKET, flaky_s3_server

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

ADAPTER_STEPS, STORE_STEPS = 12, 6
SETTINGS = [
    "env.name=tests.e2e.scripted_lookup:Lookup",
    "env.trusted_modules=[tests.e2e.scripted_lookup]",
    "buffer.lookahead=0",
    "buffer.order=strict",
    "weights.verify=true",
    "trainer.lr=3e-3",
    "trainer.warmup_steps=0",
    "trainer.mini_batch_size=8",
    "generator.concurrent_groups=8",
    "metrics.port=0",
]
"""Of runs that repeat what was sampled."""
URL = f"s3://{BUCKET}/team/run"
SHARE = 0.5
"""Of the requests to the store that fail while a run goes on."""
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


def same_history(whole: Driver, killed: Driver, steps: int) -> None:
    """Both runs have the same history, in which the policy changes."""
    expected, found = ([{key: line[key] for key in SAME} for line in run.lines()] for run in (whole, killed))
    assert len(expected) == len(found) == steps
    for step, (before, after) in enumerate(zip(expected, found, strict=True), 1):
        assert after == pytest.approx(before, rel=1e-3, abs=1e-4), f"step {step}"
    assert len({line["reward/avg_raw_reward"] for line in expected}) > 1


def test_a_run_of_an_adapter_that_was_killed_in_its_parts_and_as_a_whole_has_the_history_of_an_uninterrupted_one(
    drive: Drive,
) -> None:
    adapter = ["model.lora.rank=4", "model.warm_start.steps=200", "trainer.checkpoint_every=3"]
    settings = [*SETTINGS, *adapter, f"run.max_steps={ADAPTER_STEPS}"]
    whole = drive(settings)
    whole.finish()

    killed = drive([*settings, "run.name=killed"])
    killed.until_step(4)
    killed.kill_part("ray::TrainerRank")
    killed.until("the trainer restarts from step")
    for part in ("VLLM::EngineCore", "ray::Generator"):
        killed.until_step(killed.step() + 1)
        killed.kill_part(part)
        killed.until("generator-0 is back")
    killed.until_step(killed.step() + 1)
    killed.kill_part("ray::BufferActor")
    killed.until_step(killed.step() + 1)
    killed.kill()
    resumed = drive(["--resume", str(killed.folder)])
    resumed.finish()
    same_history(whole, killed, ADAPTER_STEPS)


def test_a_run_that_lost_its_machine_and_its_disk_goes_on_from_a_store_that_fails_half_of_the_time(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [*SETTINGS, "model.warm_start.steps=50", "trainer.checkpoint_every=2", f"run.max_steps={STORE_STEPS}"]
    whole = drive(short)
    whole.finish()
    with flaky_s3_server(share=0.0) as (environment, flaky):
        for name, value in {**environment, "AWS_ENDPOINT_URL": f"http://{flaky.server}"}.items():
            monkeypatch.setenv(name, value)
        store = Objects(URL)
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment["AWS_ENDPOINT_URL"])
        killed = drive([*short, f"run.dir={tmp_path / 'first'}", f"run.store={URL}"])
        killed.until("run folder: ")
        flaky.share = SHARE
        killed.until_true(lambda: max(stored_steps(store.names()), default=0) >= 2, "a checkpoint in the store")
        killed.kill()
        shutil.rmtree(killed.folder, ignore_errors=True)

        flaky.share = 0.0  # a command that finds its store failing says so, and ends
        resumed = drive(["--resume", URL, f"run.dir={tmp_path / 'second'}"])
        resumed.until("resuming after step")
        flaky.share = SHARE
        resumed.finish()
        assert stored_steps(store.names())[0] == STORE_STEPS
        final = json.loads(b"".join(store.get("summary.json")))
        weights = resumed.folder / "final" / "model.safetensors"
        assert b"".join(store.get("final/model.safetensors")) == weights.read_bytes()
        assert sum(flaky.met.values()) > 10, flaky.met
    assert final["state"] == "finished"
    assert any("what the run did after the upload" in line for line in resumed.said)
    assert any(f"{URL} has the checkpoint of step {STORE_STEPS} and the final weights" in line for line in resumed.said)
    same_history(whole, resumed, STORE_STEPS)


def test_a_finished_run_goes_on_longer_with_other_ranks_and_engines_and_never_without_its_journal(drive: Drive) -> None:
    first = drive([*QUICK, "run.max_steps=6", "trainer.checkpoint_every=3"])
    first.finish()
    folder = first.folder
    again = ["--resume", str(folder), "run.max_steps=8", "trainer.ranks=1", "generator.engines=2"]

    (folder / "journal").rename(folder / "elsewhere")
    without = drive(again)
    assert without.end() == 2
    assert "the journal ends at position" in without.said[-1] and "step 6" in without.said[-1]
    shutil.rmtree(folder / "journal")
    (folder / "elsewhere").rename(folder / "journal")

    resumed = drive(again)
    resumed.finish()
    lines, summary = resumed.lines(), resumed.summary()
    assert [line["trainer/global_step"] for line in lines] == list(range(1, 9))
    assert summary["tokens"]["open"] == summary["tokens"]["stepped"] == 0
    assert sum(summary["lengths"]["trained"]) == 8 * 16 * 8

    config = load([folder / "config.yaml"]).config
    for step in (2, 7):
        batch = replayed(message_limits(config), batch_settings(config), folder / "journal", step)
        assert len(batch.groups) == 16
        assert batch.metrics["reward/avg_raw_reward"] == pytest.approx(lines[step - 1]["reward/avg_raw_reward"])
