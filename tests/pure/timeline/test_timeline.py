"""The timeline of a run: recorded as Chrome trace events, kept in bounded files, and joined."""

import asyncio
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.cli.parser import main
from service.files import LOCK
from service.observe.recorder import MAX_EVENTS, States, Trace
from service.rollout import timelines as trajectories
from service.rollout.engine import Generation, Sampling
from service.rollout.timelines import TimedEngine, Timelines
from service.run.folder import CONFIG, TIMELINE
from service.run.records import timeline as files
from service.run.records.timeline import FILES, TimelineFiles, timeline_events
from service.types import Int32s, TrajectoryId
from tests.pure.conftest import Refused
from tests.pure.timeline.schema import check_trace


class Engine:
    """Takes a moment, some of it in the queue."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        await asyncio.sleep(0.004)
        ids = np.zeros(2, np.int32)
        seconds = {"queue": 0.001, "prefill": 0.001, "pause": 0.0}
        return Generation(ids, np.zeros(2, np.float32), np.zeros(2, np.int64), "stop", True, seconds=seconds)


async def play(timelines: Timelines, trajectory: TrajectoryId, turns: int, at_once: bool = False) -> None:
    """Turns of the engine, each followed by a call of the environment, or all of an agent's calls at once."""
    engine = TimedEngine(Engine(), timelines)
    with timelines.playing(trajectory, "search") as line:
        kind = "chat/" if at_once else "turn="  # as agents and as the agent loop name them
        calls = [engine.generate(np.zeros(3, np.int32), Sampling(8), f"{trajectory}/{kind}{n}") for n in range(turns)]
        if at_once:
            await asyncio.gather(*calls)
        for call in [] if at_once else calls:
            await call
            began = time.monotonic()
            await asyncio.sleep(0.002)
            timelines.answered(trajectory, "lookup", began)
        timelines.ended(line, "stop")


def a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run folder with the timeline of a driver, a generator and a buffer."""
    monkeypatch.setattr(trajectories, "SAMPLED_A_SECOND", 1e9)
    (folder / CONFIG).touch()
    (folder / LOCK).touch()
    driver, generator, buffer = sources = [
        Trace(source) for source in ("driver/driver", "generator/generator-0", "buffer/buffer")
    ]
    doing, timelines = States(driver, "trainer", "waiting"), Timelines()

    async def playing() -> None:
        together = (play(timelines, TrajectoryId(group, 0), 2) for group in range(3))
        await asyncio.gather(*together, play(timelines, TrajectoryId(3, 0), 3, at_once=True))

    asyncio.run(playing())
    doing.enter("step")
    time.sleep(0.002)
    doing.enter("waiting")
    buffer.span("leases", "lease 1", 1.0, 1.5, groups=[0, 1])
    buffer.counter("groups", {"open": 2})
    timelines.record(generator)
    writer = TimelineFiles(folder / TIMELINE)
    for source in sources:
        writer.append(source.take())
    writer.close()


def spans_of(trace: Trace) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, trace.take().splitlines()) if event["ph"] == "X"]


def test_baton_trace_joins_a_timeline_whose_rows_are_named_and_nested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path, monkeypatch)
    [file] = (tmp_path / TIMELINE).iterdir()
    with file.open("ab") as timeline:
        timeline.write(file.read_bytes().splitlines(keepends=True)[0])  # a process is named in each push
        timeline.write(b'{"ph":"X","na')  # the writer was killed
    (tmp_path / "trace.json").touch()
    (link := tmp_path / "link").symlink_to("trace.json")  # as /dev/stdout is one
    assert main(["trace", str(tmp_path), "--output", str(link)]) == 0 and link.is_symlink()
    trace = json.loads((tmp_path / "trace.json").read_text())
    check_trace(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event["name"] for event in spans]
    assert [event["ph"] for event in trace["traceEvents"]].count("C") == 1
    assert sum(name.startswith("turn") for name in names) == 3 * 2 + 3 and names.count("search: lookup") == 6
    assert {"waiting", "step", "lease 1"} <= {*names}
    wholes = [event for event in spans if event["name"].startswith("group=")]
    assert len({event["tid"] for event in wholes}) == 4
    for whole in (each for each in wholes if not each["name"].startswith("group=3")):
        parts = whole["args"]
        assert parts["environment"] >= 0.004 and parts["queue"] == pytest.approx(0.002)
        named = [parts[part] for part in trajectories.PARTS if part in parts]
        assert sum(named) == pytest.approx(whole["dur"] / 1e6, abs=1e-4)


def test_the_files_stay_bounded_and_a_restarted_hub_goes_on_in_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 2000)
    for _ in range(3):
        writer, trace = TimelineFiles(tmp_path / TIMELINE), Trace("generator/g")
        for number in range(40):
            trace.span("engine", "generating", number, number + 0.5)
            writer.append(trace.take())
        writer.close()
    kept = sorted((tmp_path / TIMELINE).iterdir())
    assert len(kept) == FILES and all(file.stat().st_size < 3000 for file in kept)
    assert [int(file.stem) for file in kept] == [*range(int(kept[0].stem), int(kept[0].stem) + FILES)]
    events = [json.loads(event) for event in timeline_events(tmp_path)]
    assert [event["name"] for event in events].count("thread_name") == 1
    assert all(file.read_bytes().startswith(b'{"ph":"M","name":"process_name"') for file in kept)


def test_a_recorder_that_nobody_empties_keeps_a_bounded_number_and_counts_the_rest() -> None:
    trace = Trace("generator/g")
    for number in range(MAX_EVENTS + 7):
        trace.counter("groups", {"open": number})
    lines = trace.take()
    assert lines.count(b'"ph":"C"') == MAX_EVENTS and b"7 events were not recorded" in lines


def test_of_many_trajectories_a_sample_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trace = [0.0], Trace("generator/g")
    monkeypatch.setattr(trajectories.time, "monotonic", lambda: now[0])
    timelines, stack = Timelines(engines=2), ExitStack()
    for number in range(4_000):
        line = stack.enter_context(timelines.playing(TrajectoryId(number, 0), "search"))
        now[0] += 0.005
        timelines.ended(line, "stop")
        if number < 2000:
            stack.close()
        timelines.record(trace)
    kept = spans_of(trace)
    assert len(kept) == 10 + trajectories.SAMPLED_AT_ONCE, "one a second, two for both engines; so many at once"
    assert len({span["tid"] for span in kept}) == trajectories.SAMPLED_AT_ONCE


def test_a_trajectory_that_goes_on_while_its_first_player_is_cancelled_is_timed_from_there() -> None:
    timelines, of, earlier = Timelines(), TrajectoryId(5, 1), ExitStack()
    cancelled = earlier.enter_context(timelines.playing(of, "search"))
    with timelines.playing(of, "search") as line:
        earlier.close()
        timelines.answered(of, "lookup", time.monotonic())
    timelines.answered(of, "lookup", time.monotonic())
    assert (len(cancelled.tools), len(line.tools)) == (0, 1)


@pytest.mark.parametrize("line", ["[]", "{}", "7", "{", '{"ph":"s","name":"x","pid":1}', '{"ph":"X","name":"x"}'])
def test_a_file_that_is_no_timeline_is_one_line(
    line: str, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_run(tmp_path, monkeypatch)
    [file] = (tmp_path / TIMELINE).iterdir()
    file.write_text(file.read_text() + line + "\n")
    refused("trace", tmp_path)
    assert not (tmp_path / "trace.json").exists()


def test_a_folder_without_a_run_or_a_timeline_is_one_line(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / CONFIG).touch()
    assert "but no run was started in this folder" in refused("trace", tmp_path)
    (tmp_path / LOCK).touch()
    assert "kept no timeline" in refused("trace", tmp_path)
