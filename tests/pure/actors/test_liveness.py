"""Who is told, and when, that a process of the run has died, is silent, or is another one than before."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.core.generated.common_pb2 import WorkerExitType
from ray.core.generated.gcs_pb2 import WorkerTableData
from ray.exceptions import RayActorError, RayTaskError
from torch import OutOfMemoryError

import actors.deaths
from actors.calls import in_a_line
from actors.deaths import KernelKills, cause_of_death, is_death, life_of, why_died
from actors.trainer.group import TrainerGroup
from actors.weights.part import TrainerLost
from service.config import Config
from service.errors import ProcessLost
from service.run.liveness import supervisor as liveness
from service.run.liveness.host_memory import FULL, REMEDIES, Memory
from service.run.liveness.supervisor import Life, Supervisor
from tests.pure.actors.fakes import answering, opened, until

FIRST, NEXT = Life("first", is_set_up=True), Life("next", is_set_up=False)
DIED = r"^the process of buffer \(first\) died: End of file$"


class Actor:
    """Answers with its present life, as soon as it may."""

    def __init__(self) -> None:
        self.life: Life | None = FIRST
        self.asked, self.may_answer = 0, opened()

    async def probe(self) -> Life | None:
        self.asked += 1
        life = self.life
        await self.may_answer.wait()
        return life

    async def asked_again(self, times: int = 2) -> None:
        enough = self.asked + times
        await until(lambda: self.asked >= enough)

    async def becomes(self, life: Life | None, times: int = 2) -> None:
        """Be so, and be asked again."""
        self.life = life
        await self.asked_again(times)


class Watch:
    """A supervisor that has asked the actor `buffer`, and its lines."""

    def __init__(self) -> None:
        self.actor, self.said = Actor(), list[str]()
        self.supervisor = Supervisor(self.said.append, cause, is_death)

    async def begun(self, life: Life | None = FIRST, **settings: Any) -> Watch:
        self.supervisor.watch("buffer", self.actor.probe, **settings)
        await self.actor.becomes(life)
        return self

    def waiting(self, name: str = "buffer") -> asyncio.Future[None]:
        """Somebody who waits for ever, unless that actor is lost."""
        endless = asyncio.Event().wait()
        return asyncio.ensure_future(asyncio.wait_for(self.supervisor.unless_lost([name], endless), 30))


async def cause(name: str, last: Life) -> str | None:
    return None if last.process == "killed by the run" else f"({last.process}) died: End of file"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("PROBE_SECONDS", 0.0), ("SILENT_SECONDS", 0.05), ("CAUSE_SECONDS", 1.0)):
        monkeypatch.setattr(liveness, name, seconds)


@pytest.mark.parametrize("after", [None, NEXT, NEXT._replace(is_set_up=True)])
async def test_a_wait_ends_with_the_cause_when_the_process_that_it_needs_dies(after: Life | None) -> None:
    """Also if Ray has already started the next one, which answers, set up or not."""
    watch = await Watch().begun()
    assert watch.supervisor.lost() == []
    waiting = watch.waiting()
    await watch.actor.asked_again()
    assert not waiting.done()
    watch.actor.life = after
    with pytest.raises(ProcessLost, match=DIED):
        await waiting
    assert watch.said == [], "who waited says it"
    assert watch.supervisor.lost() == ([] if after is not None and after.is_set_up else ["buffer"])


async def test_a_process_that_answers_but_is_not_set_up_fulfils_no_wait() -> None:
    watch = await Watch().begun(NEXT)
    with pytest.raises(ProcessLost, match=r"^buffer is not set up$"):
        await watch.waiting()


async def test_an_answer_to_a_question_from_before_the_set_up_wakes_nobody() -> None:
    watch = await Watch().begun()
    watch.actor.may_answer.clear()
    await watch.actor.becomes(None, 1)
    watch.actor.life = FIRST  # it is back and set up, and the question is still on its way
    waiting = watch.waiting()
    await asyncio.sleep(0)
    watch.actor.may_answer.set()
    await watch.actor.asked_again(3)
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize("wraps", [False, True])
async def test_a_call_that_fails_with_its_process_gets_the_cause_and_any_other_error_stays(wraps: bool) -> None:
    watch = await Watch().begun()

    async def fails(error: Exception) -> None:
        try:
            raise error
        except RayActorError as died:
            watch.actor.life = None
            if wraps:
                raise TrainerLost("the trainer failed") from died
            raise

    with pytest.raises(ZeroDivisionError):
        await watch.supervisor.unless_lost(["buffer"], fails(ZeroDivisionError()))
    with pytest.raises(ProcessLost, match=DIED):
        await watch.supervisor.unless_lost(["buffer"], fails(RayActorError()))


@pytest.mark.parametrize(("lived", "dead"), [(60.0, ["first", "2", "4"]), (0.0, ["first", *"23456"])])
async def test_a_death_for_which_nobody_waits_is_a_line_and_of_one_that_dies_for_ever_few_lines(
    monkeypatch: pytest.MonkeyPatch, lived: float, dead: list[str]
) -> None:
    monkeypatch.setattr(liveness, "LIVED_SECONDS", lived)
    watch = await Watch().begun()
    for number in range(2, 8):
        await watch.actor.becomes(FIRST._replace(process=f"{number}"), 3)
    assert [line.removeprefix("the process of buffer (").partition(")")[0] for line in watch.said] == dead
    assert all(line.endswith("End of file; Ray starts it again") for line in watch.said)
    await watch.actor.becomes(FIRST._replace(process="killed by the run"))
    before = [*watch.said]
    await watch.actor.becomes(None, 5)
    assert watch.said == before, "the run itself has ended it"
    assert watch.supervisor.restarts == {"buffer": 7}


async def test_a_process_that_dies_before_it_has_answered_is_named() -> None:
    watch = await Watch().begun(None)
    assert watch.said == ["the process of buffer died as it started; Ray starts it again"]


async def test_an_actor_that_has_no_process_for_long_is_named_again_until_it_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "AGAIN_SECONDS", 0.05)
    watch = await Watch().begun()
    watch.actor.life = None
    await until(lambda: watch.said[1:] == ["buffer still has no process"] * 2)
    await watch.actor.becomes(FIRST)
    await asyncio.sleep(0.1)
    assert "died" in watch.said[0] and len(watch.said) == 3
    await watch.actor.becomes(None)
    watch.supervisor.forget("buffer")  # its actor leaves, and another one of its name comes much later
    await asyncio.sleep(0.1)
    await watch.begun()
    assert not any("still" in line for line in watch.said[3:])


@pytest.mark.parametrize("has_process", [True, False])
async def test_silence_is_named_repeatedly_and_ends_a_wait_at_the_deadline_of_the_actor(
    monkeypatch: pytest.MonkeyPatch, has_process: bool
) -> None:
    """Also after a cut connection, where no process was there at the last answer."""
    monkeypatch.setattr(liveness, "AGAIN_SECONDS", 2 * liveness.SILENT_SECONDS)
    watch = await Watch().begun(deadline=0.15, hint=" (it hangs)")
    if not has_process:
        await watch.actor.becomes(None)
    before = len(watch.said)
    watch.actor.may_answer.clear()
    if has_process:
        with pytest.raises(ProcessLost, match=r"^no answer of buffer for 0 s \(it hangs\)$"):
            await watch.waiting()
    await until(lambda: len(watch.said) >= before + 2)
    assert watch.said[before:] == ["buffer has not answered for 0 s"] * 2


@pytest.mark.parametrize("waits_before", [True, False])
async def test_an_error_of_a_question_itself_reaches_who_waits_for_any_actor(waits_before: bool) -> None:
    """Nobody would learn of a death of the actor that is no longer asked."""
    watch = await Watch().begun()
    waiting = watch.waiting("another")
    await asyncio.sleep(0)
    watch.supervisor.watch("hub", answering(ZeroDivisionError("a bug")))
    if not waits_before:
        await watch.actor.asked_again()
        waiting.cancel()
        waiting = watch.waiting("another")
    with pytest.raises(ZeroDivisionError):
        await waiting


async def test_work_that_does_not_end_when_it_is_cancelled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "CANCEL_SECONDS", 0.05)
    watch, ends = await Watch().begun(), asyncio.Event()

    async def stubborn() -> None:
        while not ends.is_set():
            with suppress(asyncio.CancelledError):
                await ends.wait()

    waiting = asyncio.ensure_future(watch.supervisor.unless_lost(["buffer"], stubborn()))
    await watch.actor.asked_again()
    watch.actor.life = None
    with pytest.raises(RuntimeError, match="goes on 0 s after it was cancelled"):
        async with asyncio.timeout(30):
            await waiting
    ends.set()


async def test_an_actor_that_answers_is_known_while_the_control_store_of_ray_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, is_back, life = threading.Event(), threading.Event(), asyncio.get_running_loop().create_future()

    def restarts(actor: Any) -> bool:
        asked.set()
        is_back.wait(30)
        return False

    monkeypatch.setattr(actors.deaths, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(actors.deaths, "_restarts", restarts)
    asking = asyncio.ensure_future(life_of(type("Buffer", (), {"life": answering(life)})()))
    assert await asyncio.to_thread(asked.wait, 30)
    life.set_result(FIRST)
    async with asyncio.timeout(20):
        assert await asking == FIRST
    is_back.set()


async def test_a_cause_that_ray_does_not_tell_in_time_is_not_waited_for_and_a_bug_is_no_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_back = threading.Event()
    monkeypatch.setattr(actors.deaths, "CAUSE_SECONDS", 0.01)
    monkeypatch.setattr(actors.deaths, "_worker", lambda process: is_back.wait(30))
    assert await cause_of_death("buffer", FIRST) == "died; Ray's control store does not answer"
    is_back.set()
    bug = RayTaskError("life", "a traceback", ZeroDivisionError())
    with pytest.raises(RayTaskError):
        await life_of(type("Buffer", (), {"life": answering(bug)})())


# -- out of memory ----------------------------------------------------------------------------------------------------

KILLED_BY_RAY = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: 6373affb27) was 4.29GB used / 23.54GB limit (0.182225)
OOM kill reason: Memory usage 4532961280B exceeded threshold of 4521966080B (17.9% of 25276502016B limit)"""
END_OF_FILE = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ..."
)


def dead(detail: str, exit_type: int = WorkerExitType.SYSTEM_ERROR) -> WorkerTableData:
    return WorkerTableData(pid=17, exit_type=exit_type, exit_detail=detail)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["generator-0", "scorer-judge-0", "buffer"])
def test_a_process_that_ray_ended_for_want_of_memory_is_named_with_its_size_and_what_to_change(name: str) -> None:
    last = FIRST._replace(memory=Memory("192.0.2.2", 2_300_000_000, 25_000_000_000))
    said = why_died(name, last, dead(KILLED_BY_RAY, WorkerExitType.NODE_OUT_OF_MEMORY))
    assert said == (
        "(pid 17) was out of memory, at 2.3 GB: Ray ended it (its host had 4.29GB of 23.54GB in use); "
        f"{REMEDIES[name.partition('-')[0]]}, or use a host with more memory"
    )
    assert why_died(name, last, dead(END_OF_FILE)) == (
        "(pid 17) died: Worker unexpectedly exits with a connection error code 2. End of file"
    )
    assert why_died(name, last, dead("The actor is dead because it was killed by `ray.kill`.")) is None


def test_a_kill_by_the_kernel_is_likely_only_if_it_has_just_killed_something(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 7\noom_kill 3\n")
    kernel = KernelKills(counters)
    assert kernel.clause("buffer") == "", "what it killed before the run"
    counters.write_text("pgfault 7\noom_kill 4\n")
    assert kernel.clause("buffer").startswith(", most likely out of memory: the kernel has just killed a process")
    assert REMEDIES["buffer"] in kernel.clause("buffer")
    kernel._at -= 60
    assert kernel.clause("buffer") == ""


async def test_a_rank_without_gpu_memory_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda value: value)
    error = OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB")
    rank: Any = type("Rank", (), {"step": answering(RayTaskError("step", "a traceback", error))})()
    with pytest.raises(TrainerLost) as lost:
        await TrainerGroup(Config(), [rank]).step([np.zeros(0, np.uint8)])
    assert "CUDA out of memory" in str(lost.value) and REMEDIES["trainer"] in str(lost.value)
    assert in_a_line(ProcessLost("a " * 200)) == "a " * 200, "what to change is not cut off"


async def test_a_host_that_is_nearly_full_is_named_once_with_the_largest_of_its_processes() -> None:
    said: list[str] = []
    watching = Supervisor(said.append, cause, is_death)
    host = 10_000_000_000
    made: dict[str, Actor] = {"generator-0": Actor(), "buffer": Actor(), "trainer-0": Actor()}

    def uses(name: str, n_bytes: float, where: str = "10.0.0.1") -> None:
        made[name].life = FIRST._replace(memory=Memory(where, int(n_bytes), host))

    uses("generator-0", 0.6 * host)
    uses("buffer", (FULL - 0.61) * host)
    uses("trainer-0", 0.5 * host, "10.0.0.2")
    for name, actor in made.items():
        watching.watch(name, actor.probe)
    await made["trainer-0"].asked_again()
    assert said == []
    uses("buffer", (FULL - 0.59) * host)
    await made["trainer-0"].asked_again(3)
    assert said == [
        "WARNING host 10.0.0.1: the run's processes have 8.6 GB of 10.0 GB of memory; the largest is generator-0 with "
        f"6.0 GB: {REMEDIES['generator']}, or use a host with more memory"
    ]
