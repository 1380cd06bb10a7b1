"""What a run says about the hosts that hold its parts."""

import asyncio

import pytest
from ray._private.ray_logging import LogDeduplicator

from actors import SKIPPED
from actors.driver import host_watch as driver_hosts
from actors.driver.host_watch import ClusterHost, HostWatch
from service.errors import RunFailed

HEAD, RANKS, SPOT = (
    ClusterHost("10.0.0.1", ("buffer", "driver")),
    ClusterHost("10.0.0.2", ("trainer-0", "trainer-1")),
    ClusterHost("10.0.0.3 (spot)", ("generator-0",)),
)
ALL = {"one": HEAD, "two": RANKS, "three": SPOT}


def watching(found: dict[str, ClusterHost]) -> tuple[HostWatch, list[str]]:
    said: list[str] = []
    watch = HostWatch(said.append, lambda draining: None, lambda: found)
    asyncio.run(watch.begin())
    return watch, said


def test_each_host_and_what_it_holds_is_said_at_the_start_in_a_line_if_there_are_several() -> None:
    assert watching({"one": HEAD})[1] == []
    _, said = watching(ALL | {"four": ClusterHost("10.0.0.4", ())})
    assert said == [
        "host 10.0.0.1: buffer, driver",
        "host 10.0.0.2: trainer-0, trainer-1",
        "host 10.0.0.3 (spot): generator-0",
        "host 10.0.0.4: nothing of this run",
    ]


def test_a_host_that_goes_is_said_once_with_what_it_held_and_one_that_joins_too() -> None:
    watch, said = watching(ALL)
    del said[:]
    for found in ({"one": HEAD, "three": SPOT}, {"one": HEAD, "three": SPOT, "two again": RANKS}):
        watch.changed(found)
        watch.changed(found)
    assert said == ["host 10.0.0.2 is gone; it held trainer-0, trainer-1", "host 10.0.0.2 has joined"]
    with pytest.raises(RunFailed, match="the node of the driver"):
        watch.changed({"two": RANKS})


def test_generators_follow_what_is_drained_also_after_a_look_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[dict[str, ClusterHost] | None] = [ALL, None, ALL, ALL | {"three": SPOT._replace(ends_at=0)}]
    followed: list[dict[str, int]] = []
    monkeypatch.setattr(driver_hosts, "LOOK_SECONDS", 0.0)

    def look() -> dict[str, ClusterHost]:
        if (found := looks.pop(0)) is None:
            raise ConnectionError("no answer of Ray's control store")
        return found

    def follow(draining: dict[str, int]) -> None:
        followed.append(draining)
        if not looks:
            raise RunFailed("no generator could join")

    with pytest.raises(RunFailed, match="no generator could join"):
        asyncio.run(HostWatch(lambda line: None, follow, look).run())
    assert followed == [{}, {}, {"three": 0}]


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("Task BufferActor.submit failed. There are infinite retries remaining, so the task will be retried.", False),
        ("The node with node id: 4a10 and address: 10.0.0.3 and node name: b has been marked dead because\n(1)", False),
        ("A worker died or was killed while executing a task by an unexpected system error. To troubleshoot", False),
        ("Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed", True),
    ],
)
def test_what_ray_says_of_each_call_when_a_host_or_a_process_goes_is_not_printed(line: str, printed: bool) -> None:
    output = LogDeduplicator(5, None, SKIPPED)
    shown = output.deduplicate(
        {"ip": "", "pid": "raylet", "lines": [line], "job": "", "task_name": "", "actor_name": ""}
    )
    assert bool(shown and shown[0]["lines"]) == printed
