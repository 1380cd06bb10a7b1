"""A run that loses its machine and its disk goes on from the object store, which fails half of the time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from service.store.objects import Objects, stored_steps
from tests.e2e.conftest import Drive
from tests.e2e.test_adapter_resume import SETTINGS, same_history
from tests.s3_server import BUCKET, flaky_s3_server

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

URL = f"s3://{BUCKET}/team/run"
STEPS = 6
SHARE = 0.5
"""Of the requests that fail while a run goes on."""
CHANGES = [
    "model.lora=null",
    "model.warm_start.steps=50",
    "trainer.checkpoint_every=2",
    f"run.max_steps={STEPS}",
]
SHORT = [*SETTINGS, *CHANGES]


def test_killed_with_its_disk_a_run_goes_on_from_s3_with_the_history_of_the_uninterrupted_one(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = drive(SHORT)
    whole.finish()
    with flaky_s3_server(share=0.0) as (environment, flaky):
        for name, value in {**environment, "AWS_ENDPOINT_URL": f"http://{flaky.server}"}.items():
            monkeypatch.setenv(name, value)
        store = Objects(URL)
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment["AWS_ENDPOINT_URL"])
        killed = drive([*SHORT, f"run.dir={tmp_path / 'first'}", f"run.store={URL}"])
        killed.folder = tmp_path / "first" / "quickstart"
        killed.until("run folder: ")
        flaky.share = SHARE
        killed.until_true(lambda: max(stored_steps(store.names()), default=0) >= 2, "a checkpoint in the store")
        killed.kill()
        shutil.rmtree(killed.folder, ignore_errors=True)

        flaky.share = 0.0  # a command that finds its store failing says so, and ends
        resumed = drive(["--resume", URL, f"run.dir={tmp_path / 'second'}"])
        resumed.folder = tmp_path / "second" / "quickstart"
        resumed.until("resuming after step")
        flaky.share = SHARE
        resumed.finish()
        assert stored_steps(store.names())[0] == STEPS
        final = json.loads(b"".join(store.get("summary.json")))
        weights = resumed.folder / "final" / "model.safetensors"
        assert b"".join(store.get("final/model.safetensors")) == weights.read_bytes()
        assert sum(flaky.met.values()) > 10, flaky.met
    assert final["state"] == "finished"
    assert any("what the run did after the upload" in line for line in resumed.said)
    assert any(f"{URL} has the checkpoint of step {STEPS} and the final weights" in line for line in resumed.said)
    same_history(whole.folder, resumed.folder, STEPS)
