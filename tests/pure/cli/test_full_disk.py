"""A disk that is full when a part of a run writes: one line says so, and with room again the run goes on."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.driver import run as running
from service.cli import main
from service.handoff.journal.journal import Journal
from service.learn.checkpoint import CheckpointWriter
from service.rollout.prompts import files
from service.run.checkpoints import Checkpoints
from service.run.preparing import inputs
from service.run.records.writer import RunWriter
from tests.pure.cli.test_resume_refused import STEP, trained

pytestmark = pytest.mark.full

QUICKSTART = Path("configs/quickstart.yaml").resolve()
WRITERS: dict[str, tuple[Any, str]] = {
    "the run folder": (running, "new_run_folder"),
    "the rows": (files, "write_rows"),
    "the model": (inputs, "make_model"),
    "the tokenizer": (inputs, "make_tokenizer"),
    "the configuration": (RunWriter, "begin"),
    "the journal": (Journal, "__init__"),
    "a checkpoint": (CheckpointWriter, "start"),
    "its manifest": (Checkpoints, "finish"),
    "the metrics": (RunWriter, "log_step"),
    "the trajectories": (RunWriter, "append_trajectories"),
    "the curve": (RunWriter, "plot"),
    "the summary": (RunWriter, "write_summary"),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB and a few hundred files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m,nr_inodes=256", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=10).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=10)


def fill(disk: Path) -> None:
    """Take all the room that is left, so that not even an empty file can be made."""
    for number in range(1 << 16):
        try:
            with (disk / f"ballast-{number}").open("ab", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
        except OSError:
            if not (disk / f"ballast-{number}").exists():
                return


def in_full(folder: RunWriter) -> None:
    """What a run writes besides its journal and its checkpoints."""
    try:
        folder.log_step({"trainer/global_step": STEP})
        folder.append_trajectories([{"id": "group=1/sample=0/attempt=0"}])
        folder.plot()
    finally:
        folder.close()


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_is_full_when_a_part_of_a_run_writes_is_named_in_one_line(
    disk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], writer: str
) -> None:
    def run(config: Any, folder: RunWriter, *others: Any) -> int:
        in_full(folder)
        return trained(config, folder, *others)

    of, name = WRITERS[writer]
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    monkeypatch.setattr(running, "refuse_open_ray", lambda environment: None)
    monkeypatch.setattr(running, "_run_on_ray", run)
    monkeypatch.setattr(of, name, filling(disk, getattr(of, name)))
    settings = ["model.warm_start=null", f"run.max_steps={STEP}", "metrics.port=0", f"run.dir={disk / 'runs'}"]
    code = main(["run", "--config", str(QUICKSTART), *settings])
    err = capsys.readouterr().err
    assert code == (2 if writer == "the run folder" else 1) and err.startswith("baton: ") and err.count("\n") == 1, err
    assert "No space left on device" in err and str(disk) in err


def filling(disk: Path, write: Callable[..., Any]) -> Callable[..., Any]:
    """The same, on a disk that is full from then on."""

    def on_a_full_disk(*arguments: Any, **named: Any) -> Any:
        fill(disk)
        return write(*arguments, **named)

    return on_a_full_disk
