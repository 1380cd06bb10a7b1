"""The forced end of a run, `run.stop_grace` seconds after the stop signal."""

import json
import threading
from functools import partial
from pathlib import Path
from typing import Never

import pytest

from actors.driver.run import end_by_force
from actors.driver.signals import force_after
from service.config import Config
from service.run.folder import SUMMARY
from service.run.records.writer import RunWriter
from tests.pure.forked import Forked


def forced(path: Path, disk: str, final: str, every: int) -> Never:
    """A run of which nothing but its forced end comes."""

    def fails(*_: object) -> Never:
        raise OSError(28, "No space left on device")

    folder = RunWriter(path)
    if disk == "full":
        folder.write_summary = fails  # type: ignore[method-assign]
    config = Config.model_validate({"trainer": {"checkpoint_every": every}})
    folder.step, folder.has_final = config.run.max_steps, final == "written"
    with force_after(0.1, partial(end_by_force, config, folder, "too late")) as start:
        start(15)
        threading.Event().wait(60)
    raise AssertionError("it was not ended")


def test_a_run_is_ended_by_force_also_where_its_folder_cannot_be_written(tmp_path: Path) -> None:
    with Forked(forced, tmp_path, "full", "written", 0) as run:
        assert run.wait() == 128 + 15
    assert not (tmp_path / SUMMARY).exists()


@pytest.mark.parametrize(
    ("final", "every", "said"),
    [
        ("missing", 20, " are not written; `baton run --resume {} goes on from the newest checkpoint and writes them"),
        ("missing", 0, " are not written, and with trainer.checkpoint_every=0 there is no checkpoint"),
        ("written", 20, ""),
    ],
)
def test_a_forced_end_says_of_which_step_the_weights_are_not_written_and_what_writes_them(
    tmp_path: Path, final: str, every: int, said: str
) -> None:
    with Forked(forced, tmp_path, "free", final, every) as run:
        told = run.stdout.read()
    reason = json.loads((tmp_path / SUMMARY).read_text())["reason"]
    assert reason in told
    assert (f"the final weights of step {Config().run.max_steps} are not written" in reason) == bool(said)
    assert said.replace("{}", f"{tmp_path}`") in reason
