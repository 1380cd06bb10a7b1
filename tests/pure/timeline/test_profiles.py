"""Profiles of a running run: asked for by a file, recorded by ranks, and answered."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.trainer import step_profiles as written
from actors.trainer.step_profiles import Profiles
from service.cli.parser import main
from service.files import create_private, lock_folder
from service.learn.profile import StepProfile
from service.run.folder import CONFIG
from service.run.profiles import MAX_STEPS, PROFILES, REQUEST, ProfileRequests


class Ranks:
    """Ranks whose profile is the number of steps that it took."""

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}

    async def begin_profile(self, ranks: tuple[int, ...], steps: int) -> None:
        self.taken = dict.fromkeys(ranks, 0)

    def step(self) -> None:
        self.taken = {rank: taken + 1 for rank, taken in self.taken.items()}

    async def profiles(self, ranks: tuple[int, ...]) -> list[bytes]:
        return [f"rank {rank}, {self.taken[rank]} steps".encode() for rank in ranks]


def trained(folder: Path, *words: str, steps: int = 400) -> int:
    """The exit code of `baton profile` while a run with two ranks takes its steps."""
    (folder / CONFIG).touch()
    ranks, codes, over = Ranks(), list[int](), threading.Event()
    profiles = Profiles(folder, 2, ranks, lambda line: None)  # type: ignore[arg-type]

    def asks() -> None:
        codes.append(main(["profile", str(folder), *words]))
        over.set()

    async def trains() -> None:
        for step in range(1, steps):
            await profiles.before()
            ranks.step()
            await profiles.after(step)
            if over.wait(0.01):
                break

    with lock_folder(folder, 1.0):
        thread = threading.Thread(target=asks)
        thread.start()
        asyncio.run(trains())
    thread.join()
    return codes[0]


def test_the_next_steps_of_the_chosen_ranks_are_profiled_and_the_files_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "--steps", "3", "--ranks", "1,0") == 0
    said = capsys.readouterr().out.splitlines()
    files = [Path(line.partition(" (")[0]) for line in said]
    assert [file.name.partition("trainer-")[2] for file in files] == ["1.json.gz", "0.json.gz"]
    assert [file.read_text() for file in files] == ["rank 1, 3 steps", "rank 0, 3 steps"]
    assert not (tmp_path / PROFILES / REQUEST).exists()


def test_a_profile_holds_every_operation_of_its_steps_and_of_no_other() -> None:
    recorded = StepProfile(2, torch.device("cpu"))
    torch.ones(4, 4) @ torch.ones(4, 4)
    for _ in range(2):
        assert recorded.file is None
        with recorded.step():
            torch.ones(8, 8) @ torch.ones(8, 8)
    events = json.loads(gzip.decompress(recorded.file or b""))["traceEvents"]
    assert sum(event["name"] == "aten::matmul" for event in events) == 2


def test_a_rank_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    create_private(tmp_path / REQUEST, json.dumps({"id": "odd", "steps": 1, "ranks": [0, 0]}))
    assert ProfileRequests(tmp_path).request(2) is None
    assert "each once" in (tmp_path / "answer.json").read_text()


@pytest.mark.parametrize("words", [["--ranks", "2"], ["--steps", str(MAX_STEPS + 1)]])
def test_what_a_run_cannot_profile_is_one_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, *words) == 2
    assert "there are ranks 0 to 1" in capsys.readouterr().err


def test_a_profile_that_is_too_large_is_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "MAX_BYTES", 10)
    assert trained(tmp_path) == 2
    assert "take fewer steps" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / PROFILES).iterdir()] == ["answer.json"]


def test_a_run_that_is_over_is_not_asked_and_one_that_ends_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(tmp_path, "--steps", "9", steps=4) == 1
    assert "ended before the profile was whole" in capsys.readouterr().err
    assert main(["profile", str(tmp_path)]) == 2
    assert "not going on" in capsys.readouterr().err


def test_a_second_request_is_refused_while_the_first_is_recorded_and_a_lost_trainer_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / CONFIG).touch()
    profiles = Profiles(tmp_path, 1, Ranks(), lambda line: None)  # type: ignore[arg-type]
    create_private(tmp_path / PROFILES / REQUEST, json.dumps({"id": "first", "steps": 2, "ranks": [0]}))
    with lock_folder(tmp_path, 1.0):
        assert main(["profile", str(tmp_path)]) == 2
    assert "another profile" in capsys.readouterr().err
    asyncio.run(profiles.before())
    profiles.lost()
    answer: Any = json.loads((tmp_path / PROFILES / "answer.json").read_text())
    assert (answer["id"], answer["problem"]) == ("first", "the trainer failed while it was profiled")
    asyncio.run(profiles.after(1))


def test_a_request_that_is_none_is_deleted(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path, 1, SimpleNamespace(), lambda line: None)  # type: ignore[arg-type]
    create_private(tmp_path / PROFILES / REQUEST, '{"id": 7}')
    asyncio.run(profiles.before())
    assert not (tmp_path / PROFILES / REQUEST).exists()
