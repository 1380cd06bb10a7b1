"""What ended without being trained is kept too, with its fate and its reason, in bounded number."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.cli.parser import main
from service.config import Config
from service.run.records.trajectories import FAILED, LostTrajectories, RecordSettings
from service.run.records.writer import RunWriter
from service.types import TrajectoryEnd, TrajectoryId
from tests.pure.buffer.world import World, config, step


def watched(folder: Path, settings: Config, kept: int = 8) -> tuple[World, LostTrajectories]:
    run = settings.run.model_copy(update={"trajectories_per_step": kept})
    lost = LostTrajectories(RecordSettings.of(settings.model_copy(update={"run": run})))
    world = World(folder, settings)
    world.buffer.watch_ends(lost.ended, lost.failed)
    return world, lost


def test_a_filtered_group_is_kept_with_its_reason_and_its_whole_trajectory(tmp_path: Path) -> None:
    world, lost = watched(tmp_path, config(algorithm={"filter_zero_variance": True}))
    world.generator.finish(world.generator.claimed(), rewards=(1.0, 1.0))
    (record,) = lost.take()
    assert (record["fate"], record["reason"], record["return"]) == ("filtered", "zero_variance", 1.0)
    assert (record["advantage"], record["loss_tokens"], record["sampled_tokens"]) == (None, 0, 4)
    assert (record["prompt_uid"], record["rows"], len(record["steps"])) == ("p0", 1, 2)
    assert lost.take() == []


def test_a_refused_group_is_kept_with_as_much_as_had_come(tmp_path: Path) -> None:
    world, lost = watched(tmp_path, config(buffer={"max_attempts": 1}))
    work = world.generator.claimed()
    of = TrajectoryId(work.group_id, 0)
    # The last of these steps cannot be shown: the one before it never came.
    world.generator.send([step(of, work.prompt_uid, 0), step(of, work.prompt_uid, 2)])
    world.clock.now += 11
    world.buffer.tick()
    (record,) = lost.take()
    assert (record["fate"], record["reason"], record["stop_reason"]) == ("refused", "max_attempts", "unfinished")
    assert (record["return"], [each["index"] for each in record["steps"]]) == (None, [0])


def test_trained_groups_are_not_lost_and_a_replay_tells_nothing(tmp_path: Path) -> None:
    world, lost = watched(tmp_path, config(algorithm={"filter_zero_variance": True}))
    world.generator.finish(world.generator.claimed(), rewards=(1.0, 1.0))
    for _ in range(2):
        world.generator.finish(world.generator.claimed())
    world.train()
    assert len(lost.take()) == 1
    world.crash().watch_ends(lost.ended)
    assert lost.take() == []


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_attempts_that_failed_are_kept_with_why_and_listed_alone(
    kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, lost = watched(tmp_path, config(algorithm={"filter_zero_variance": True}), kept)
    world.generator.finish(world.generator.claimed(), rewards=(1.0, 1.0))
    for _ in range(5):
        work = world.generator.claimed()
        of = TrajectoryId(work.group_id, 0)
        why = TrajectoryEnd(of, work.prompt_uid, 1, "environment_error", 1.0, b"", b"KeyError: 'age'")
        world.generator.send([step(of, work.prompt_uid, 0)], [why])
    records = lost.take()
    failed = [record for record in records if record["fate"] == FAILED]
    assert len(failed) == kept and len(records) == 2 * kept - (kept > 1) * (kept - 1)
    for record in failed:
        assert (record["reason"], record["return"], len(record["steps"])) == ("environment_error", None, 1)
        assert record["transcript"] == "KeyError: 'age'"
    if kept:
        folder = RunWriter(tmp_path / "run")
        folder.append_trajectories(records)
        for words_, shown in (([], ("failed", "filtered")), (["--failed"], ("failed",))):
            assert main(["trajectories", "list", str(folder.path), *words_]) == 0
            listed = capsys.readouterr().out
            assert [fate for fate in ("failed (", "filtered (") if fate in listed] == [f"{fate} (" for fate in shown]


def test_a_log_probability_that_is_not_finite_can_be_written(tmp_path: Path) -> None:
    world, lost = watched(tmp_path, config())
    work = world.generator.claimed()
    whole = step(TrajectoryId(work.group_id, 0), work.prompt_uid, 0)
    odd = replace(whole, logprobs=np.array([np.nan, -0.5], np.float32))
    world.generator.send([odd])
    world.buffer.end()
    folder = RunWriter(tmp_path / "run")
    records = lost.take()
    folder.append_trajectories(records)
    assert json.loads((folder.path / "trajectories.jsonl").read_text())["steps"][0]["logprobs"] == [None, -0.5]
