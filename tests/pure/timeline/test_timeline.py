"""The timeline of a run: recorded, kept in bounded files, and written as Chrome trace events."""

from __future__ import annotations

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
from service.observe import recorder
from service.observe.recorder import MAX_EVENTS, States, Trace
from service.rollout import timelines as trajectories
from service.rollout.engine import Generation, Sampling
from service.rollout.timelines import TimedEngine, Timelines
from service.run import timeline as files
from service.run.folder import CONFIG, TIMELINE
from service.run.timeline import FILES, TimelineFiles, read_timeline
from service.trace.chrome import chrome_trace, trace_lines
from service.types import Int32s, TrajectoryId
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


def a_run(folder: Path) -> Timelines:
    """A run folder with the timeline of a driver, a rank, a generator and a buffer."""
    (folder / CONFIG).touch()
    driver, rank, generator, buffer = sources = [
        Trace(source) for source in ("driver/driver", "trainer/trainer-0", "generator/generator-0", "buffer/buffer")
    ]
    doing, ranks = States(driver, "trainer", "waiting"), States(rank, "rank", "waiting")
    timelines = Timelines()

    async def playing() -> None:
        together = (play(timelines, TrajectoryId(group, 0), 2) for group in range(3))
        await asyncio.gather(*together, play(timelines, TrajectoryId(3, 0), 3, at_once=True))

    doing.enter("waiting", reason="groups")
    asyncio.run(playing())
    for step in (1, 2):
        began = time.monotonic()
        time.sleep(0.002)
        buffer.span("leases", f"lease {step}", began, time.monotonic(), lease=step, groups=[2 * step - 2, 2 * step - 1])
        doing.enter("step")
        ranks.enter("forward_backward")
        time.sleep(0.003)
        ranks.enter("waiting")
        doing.enter("commit")
        began = time.monotonic()
        time.sleep(0.002)
        buffer.span("commits", f"step {step}", began, time.monotonic(), lease=step)
        buffer.counter("groups", {"open": 4 - step})
        doing.enter("waiting")
    ranks.enter("checkpoint")
    timelines.record(generator)
    writer = TimelineFiles(folder / TIMELINE)
    for source in sources:
        writer.append(source.take())
    writer.close()
    return timelines


def events(folder: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads("".join(trace_lines(chrome_trace(read_timeline(folder)))))
    check_trace(trace)
    return trace


def test_a_timeline_is_a_chrome_trace_whose_rows_and_flows_are_whole(tmp_path: Path) -> None:
    a_run(tmp_path)
    trace = events(tmp_path)
    flows = [event for event in trace["traceEvents"] if event["ph"] in "stf"]
    slices = {
        (event["pid"], event["tid"], event["ts"]): event["name"] for event in trace["traceEvents"] if "dur" in event
    }
    first = [slices[event["pid"], event["tid"], event["ts"]] for event in flows if event["id"] == flows[0]["id"]]
    assert first[0] == "claim" or first[0].startswith("group=")
    assert [name for name in first if name.startswith(("turn", "search"))] == [
        "turn 1",
        "search: lookup",
        "turn 2",
        "search: lookup",
    ]
    assert [name.split()[0] for name in first[-2:]] == ["lease", "step"]
    assert len({event["id"] for event in flows}) == 4
    assert sum(event["name"].startswith("turn") for event in trace["traceEvents"]) == 3 * 2 + 3


def test_a_rank_waits_for_what_the_trainer_did_meanwhile(tmp_path: Path) -> None:
    a_run(tmp_path)
    trace = events(tmp_path)
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "rank"}
    assert {"forward_backward", "waiting: mini-batch", "waiting: commit"} <= names
    assert "4 kept of 4" in trace["otherData"]["trajectories"]


def test_waits_of_the_timeline_add_up_to_the_seconds_that_metrics_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trace = [50.0], Trace("driver/driver")
    states = States(trace, "trainer", "waiting", lambda: now[0])
    lengths = [0.0004, 0.3, 7.5, 0.02] * 20
    for number, seconds in enumerate(lengths):
        now[0] += seconds
        states.seconds()  # as each push does
        states.enter("step" if number % 2 == 0 else "waiting")
    spans = [json.loads(line) for line in trace.take().splitlines()[1:]]
    recorded = sum(ended - began for _, _, name, began, ended, _ in spans if name == "waiting")
    assert recorded == pytest.approx(states.seconds()["waiting"], rel=0.02)
    assert states.seconds()["waiting"] == pytest.approx(sum(lengths[0::2]))


def test_the_parts_of_a_trajectory_add_up_to_its_time(tmp_path: Path) -> None:
    a_run(tmp_path)
    for one in read_timeline(tmp_path).trajectories:
        if one.of.group_id < 3:
            assert sum(one.parts.values()) == pytest.approx(one.span.ended - one.span.began, abs=1e-4)
            assert one.parts["environment"] >= 0.004 and one.parts["queue"] == pytest.approx(0.002)


def test_a_killed_writer_costs_its_last_line_only(tmp_path: Path) -> None:
    a_run(tmp_path)
    (file,) = (tmp_path / TIMELINE).iterdir()
    whole = len(events(tmp_path)["traceEvents"])
    file.write_bytes(file.read_bytes() + b'["span", "engine", "gener')
    assert len(events(tmp_path)["traceEvents"]) == whole


def test_the_files_stay_bounded_and_a_restarted_hub_goes_on_in_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 2000)
    (tmp_path / CONFIG).touch()
    for _ in range(3):
        writer, trace = TimelineFiles(tmp_path / TIMELINE), Trace("generator/g")
        for number in range(200):
            trace.span("engine", "generating", number, number + 0.5)
            writer.append(trace.take())
        writer.close()
    kept = sorted((tmp_path / TIMELINE).iterdir())
    assert len(kept) == FILES and all(file.stat().st_size < 3000 for file in kept)
    assert [int(file.stem) for file in kept] == [*range(int(kept[0].stem), int(kept[0].stem) + FILES)]
    assert read_timeline(tmp_path).rows["generator/g", "engine"][-1].ended > 0


def test_a_recorder_that_nobody_empties_keeps_a_bounded_number_and_counts_the_rest() -> None:
    trace = Trace("generator/g")
    for number in range(MAX_EVENTS + 7):
        trace.counter("groups", {"open": number})
    header, *kept = trace.take().splitlines()
    assert (len(kept), json.loads(header)["dropped"]) == (MAX_EVENTS, 7)


def test_hosts_whose_monotonic_clocks_differ_are_aligned_by_their_wall_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / CONFIG).touch()
    writer, here = TimelineFiles(tmp_path / TIMELINE), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: here + 500.0)  # the other host was started 500 s earlier
    far = Trace("generator/far")
    far.span("engine", "generating", here + 520, here + 521)
    writer.append(far.take())
    writer.close()
    (span,) = read_timeline(tmp_path).rows["generator/far", "engine"]
    assert span.began == pytest.approx(time.time() + 20, abs=1.0) and span.seconds == pytest.approx(1.0)


def test_of_many_trajectories_a_stated_sample_is_kept_and_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, trace = [0.0], Trace("generator/g")
    monkeypatch.setattr(trajectories.time, "monotonic", lambda: now[0])
    timelines = Timelines(engines=2)
    for number in range(20_000):
        with timelines.playing(TrajectoryId(number, 0), "search") as line:
            now[0] += 9.0 if number % 5000 == 4321 else 0.005
            timelines.ended(line, "stop")
        timelines.record(trace)
    lines = [json.loads(line) for line in trace.take().splitlines()[1:]]
    kept = [line for line in lines if line[0] == recorder.TRAJECTORY]
    late = [line for line in kept if line[2] == "sampled" and line[1][0] >= 4000]
    assert 0.5 * now[0] < len(late) < 1.5 * now[0]  # one a second: two for both engines
    assert {4321, 9321, 14321, 19321} - {line[1][0] for line in kept} <= {19321}  # whose window is not over
    played, every, sums = [line for line in lines if line[0] == recorder.TOTALS][-1][1:]
    assert every > 50 and ["search", "other", played] in [row[:3] for row in sums]
    timelines.finish()
    timelines.record(trace)
    last = [json.loads(line) for line in trace.take().splitlines()[1:]]
    assert 19321 in {line[1][0] for line in (*kept, *last) if line[0] == recorder.TRAJECTORY}
    assert [line[1:3] for line in last if line[0] == recorder.TOTALS] == [[20_000, every]]


def test_baton_trace_writes_the_file_and_leaves_out_what_ended_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run(tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    assert "4 kept of 4" in capsys.readouterr().out
    check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert main(["trace", str(tmp_path), "--last", "0.00001", "--output", str(tmp_path / "end.json")]) == 0
    assert (tmp_path / "end.json").stat().st_size < (tmp_path / "trace.json").stat().st_size / 2


def test_a_folder_with_only_a_configuration_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CONFIG).touch()
    assert main(["trace", str(tmp_path)]) == 2
    assert "but no run was started in this folder" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["[]", "{}", '["span"]', '["span",1,2,3,4,5]', "7", "{"])
def test_a_file_that_is_no_timeline_is_one_line(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path)
    (file,) = (tmp_path / TIMELINE).iterdir()
    file.write_text(file.read_text() + line + "\n")
    assert main(["trace", str(tmp_path)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("baton: ")


def test_a_run_without_a_timeline_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / CONFIG).touch()
    (tmp_path / LOCK).touch()
    assert main(["trace", str(tmp_path)]) == 2
    assert "kept no timeline" in capsys.readouterr().err


def test_a_trajectory_that_goes_on_while_its_first_player_is_cancelled_is_timed_from_there() -> None:
    timelines, of, earlier = Timelines(), TrajectoryId(5, 1), ExitStack()
    cancelled = earlier.enter_context(timelines.playing(of, "search"))
    with timelines.playing(of, "search") as line:
        earlier.close()
        timelines.answered(of, "lookup", time.monotonic())
    timelines.answered(of, "lookup", time.monotonic())
    assert (len(cancelled.calls), len(line.calls)) == (0, 1)


def test_slow_trajectories_are_named_with_the_part_and_the_tool_that_took_longest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "WINDOW_SECONDS", 1e-9)
    a_run(tmp_path)
    assert main(["trajectories", "slow", str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    words = [line.split() for line in said if line.startswith("search")]
    assert 97 <= sum(int(share.removesuffix("%")) for _, part, share, *_ in words if part in trajectories.PARTS) <= 103
    assert "lookup" in {name for _, name, *_ in words}
    worst = [line for line in said if line.startswith("group=")]
    assert len(worst) == 4 and "of all 4" in said[-1]
    name = worst[0].split()[0]
    assert main(["trajectories", "slow", str(tmp_path), name.split("/")[0].removeprefix("group=")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(name) and any("turn 2" in line and "queue 0.001 s" in line for line in said)
    assert main(["trajectories", "slow", str(tmp_path), "77"]) == 2
    assert "77: not among the 4" in capsys.readouterr().err


DAMAGE: list[tuple[str, Any, Any]] = [
    ("span", 3, None), ("span", 4, 10**400), ("span", 1, ["x"]), ("span", 5, {"reason": float("nan")}),
    ("counter", 2, "soon"), ("counter", 3, {"open": float("inf")}), ("trajectory", 1, [1, 2]), ("trajectory", 3, 7),
    ("trajectory", 7, {"decode": "long"}), ("trajectory", 8, [["", 1.0]]), ("trajectory", 5, float("nan")),
    ("totals", 3, [["lookup"]]), ("totals", 3, 1), ("span", 0, "of another version"), ("span", 0, []),
    ("span leases", 5, {"lease": 1}), ("span commits", 5, {"lease": [1]}), ("span", 4, -1e9), ("trajectory", 6, -1.0),
    ("from", "host", None), ("from", "dropped", "x"), ("from", "wall", 1e300),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "place", "value"), DAMAGE)
def test_a_timeline_with_a_damaged_line_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, place: Any, value: Any
) -> None:
    a_run(tmp_path)
    [file] = (tmp_path / TIMELINE).glob("*.jsonl")
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    lines.append(["totals", 1, 1, [["lookup", "decode", 1, 0.5, 0.5]]])
    names = kind.split()
    damaged = next(line for line in lines if names == (line[: len(names)] if isinstance(line, list) else [*line][:1]))
    damaged[place] = value
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for command in (["trace"], ["trajectories", "slow"]):
        assert main([*command, str(tmp_path)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and "its timeline is not one of this version" in said.err
