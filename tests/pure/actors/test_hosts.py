"""What a run says about the hosts that hold its parts."""

from __future__ import annotations

import asyncio

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
