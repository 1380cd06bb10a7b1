"""What a run says about the hosts that hold its parts."""

from __future__ import annotations

import asyncio

import pytest
from ray._private.ray_logging import LogDeduplicator

from actors import SKIPPED
from actors.driver.hosts import Host, HostWatch

HEAD, RANKS, SPOT = (
    Host("10.0.0.1", ("buffer", "driver")),
    Host("10.0.0.2", ("trainer-0", "trainer-1")),
    Host("10.0.0.3 (spot)", ("generator-0",)),
)
ALL = {"one": HEAD, "two": RANKS, "three": SPOT}


def watching(found: dict[str, Host]) -> tuple[HostWatch, list[str]]:
    said: list[str] = []
    watch = HostWatch(said.append, lambda: found)
    asyncio.run(watch.begin())
    return watch, said


def test_each_host_and_what_it_holds_is_said_at_the_start_in_a_line() -> None:
    _, said = watching(ALL | {"four": Host("10.0.0.4", ())})
    assert said == [
        "host 10.0.0.1: buffer, driver",
        "host 10.0.0.2: trainer-0, trainer-1",
        "host 10.0.0.3 (spot): generator-0",
        "host 10.0.0.4: nothing of this run",
    ]


def test_nothing_is_said_where_there_is_one_host() -> None:
    assert watching({"one": HEAD})[1] == []


def test_a_host_that_goes_is_said_once_with_what_it_held_and_where_that_went() -> None:
    watch, said = watching(ALL)
    del said[:]
    two, three = Host(RANKS.name, RANKS.parts[:1]), Host(SPOT.name, (*SPOT.parts, "trainer-1"))
    watch.changed({"one": HEAD, "three": SPOT})
    watch.changed({"one": HEAD, "three": SPOT})
    watch.changed({"one": HEAD, "three": three})
    watch.changed({"one": HEAD, "three": three, "two again": two})
    watch.changed({"one": HEAD, "three": three, "two again": two})
    assert said == [
        "host 10.0.0.2 is gone; it held trainer-0, trainer-1",
        "host 10.0.0.3 (spot) now holds trainer-1",
        "host 10.0.0.2 has joined",
        "host 10.0.0.2 now holds trainer-0",
    ]


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("Task BufferActor.submit failed. There are infinite retries remaining, so the task will be retried.", False),
        ("Task BufferActor.claim failed. There are 3 retries remaining, so the task will be retried.", False),
        ("The node with node id: 4a10 and address: 10.0.0.3 and node name: b has been marked dead because\n(1)", False),
        ("A worker died or was killed while executing a task by an unexpected system error.", True),
    ],
)
def test_what_ray_says_of_each_call_when_a_host_goes_is_not_printed(line: str, printed: bool) -> None:
    ray = LogDeduplicator(5, None, SKIPPED)
    shown = ray.deduplicate({"ip": "", "pid": "raylet", "lines": [line], "job": "", "task_name": "", "actor_name": ""})
    assert bool(shown and shown[0]["lines"]) == printed
