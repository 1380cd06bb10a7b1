"""One address for all agents: whatever dies behind it, no session is lost and no step is sampled twice."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from service.agents import gateway as gateways
from service.agents import policy_calls
from service.agents.dialects.dialect import Refused
from service.agents.gateway import Gateway
from service.agents.session import MAX_BODY_BYTES
from service.agents.sessions import session_key
from service.errors import RunFailed
from service.handoff.steps.tables import steps_table
from service.rollout.chat.chat import Chat
from service.types import EvaluationId, Step, TrajectoryId
from tests.pure.agents.endpoint import CHAT, SECRET, Client, ScriptedServer, connected, events_of, until, whole
from tests.pure.agents.talks import ALL, TALKS, ChatTalk


class StartedGateway:
    """A gateway in front of generators, and the buffer that it asks."""

    def __init__(self) -> None:
        self.ended: set[TrajectoryId] = set()
        self.gateway, self.address = Gateway(SECRET, self.continues, 60.0), ""

    async def continues(self, of: TrajectoryId) -> bool:
        return of not in self.ended

    async def start(self, port: int = 0) -> None:
        self.address = await self.gateway.start("127.0.0.1", port)

    async def again(self, *servers: ScriptedServer) -> None:
        """Kill the gateway; another process has its address."""
        await self.gateway.stop()
        self.gateway = Gateway(SECRET, self.continues, 60.0)
        await self.start(int(self.address.rpartition(":")[2]))
        self.serve(*servers)

    def serve(self, *servers: ScriptedServer) -> None:
        for number, server in enumerate(servers):
            self.gateway.serves(f"generator-{number}", server.address)


@pytest_asyncio.fixture(loop_scope="function")
async def started(server: ScriptedServer) -> AsyncIterator[StartedGateway]:
    made = StartedGateway()
    await made.start()
    made.serve(server)
    yield made
    await made.gateway.stop()


@pytest_asyncio.fixture(loop_scope="function")
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


@ALL
async def test_an_answer_is_the_same_through_the_gateway_whole_or_streamed(
    server: ScriptedServer,
    started: StartedGateway,
    http: aiohttp.ClientSession,
    make: type[ChatTalk],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_calls, "KEEP_ALIVE_SECONDS", 0.02)
    key, talk = server.session().key, make("age ?")
    direct, through = (Client(http, where, key) for where in (server, started))
    whole = await through.post(talk.path, talk.body())
    retried = await direct.post(talk.path, talk.body(), x_stainless_retry_count="1")
    assert {**whole[1], "created": 0, "created_at": 0} == {**retried[1], "created": 0, "created_at": 0}
    server.accepting.clear()
    streaming = asyncio.create_task(through.stream(talk.path, talk.body()))
    await until(lambda: len(server.steps) == 2)
    await asyncio.sleep(0.1)
    server.accepting.set()
    said = await streaming
    assert said.startswith(policy_calls.COMMENT) and b"17" in said and len(server.steps) == 2
    refused = await through.post(talk.path, b"[" * 3 + b"x" * MAX_BODY_BYTES)
    assert refused == await direct.post(talk.path, b"[" * 3 + b"x" * MAX_BODY_BYTES) and refused[0] == 400


async def test_a_key_of_no_session_is_refused_without_a_generator_and_an_ended_one_by_the_buffers_word(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.session()
    for key in ("", "3-0-0.", session.key[:-1], f"3-1-0.{session.key.partition('.')[2]}", "\u00e4.\u00e4"):
        status, reply = await Client(http, started, key).post(CHAT, {})
        assert status == 401 and reply["error"]["code"] == "invalid_api_key"
    await server.endpoint.stop()
    monkeypatch.setattr(gateways, "SILENT_SECONDS", 0.0)
    started.ended.add(session.trajectory)  # a newer attempt replaced it, and its worker wakes up
    assert (await Client(http, started, session.key).post(CHAT, ChatTalk("age ?").body()))[0] == 409
    assert not server.steps


async def test_a_call_of_a_session_that_no_generator_holds_waits_then_gets_503(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.session()
    server.sessions._open.clear()
    client = Client(http, started, session.key)
    waiting = asyncio.create_task(client.post(CHAT, ChatTalk("age ?").body()))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    session = server.session()
    assert (await waiting)[0] == 200
    monkeypatch.setattr(gateways, "WAIT_SECONDS", 0.0)
    await started.again()
    answer = await client.answer(CHAT, ChatTalk("age ?").body())
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1") and not session.refused
    started.serve(server)
    assert (await client.post("/rl/sessions/x/finish", {"reward": 1.0}))[0] == 200
    assert session.refused.startswith("503 no generator has held"), "as soon as a generator holds the session"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_killed_gateway_is_back_at_its_address_and_a_repeated_call_is_the_same_step(
    server: ScriptedServer,
    started: StartedGateway,
    http: aiohttp.ClientSession,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_calls, "KEEP_ALIVE_SECONDS", 0.02)
    session, body = server.session(), {**ChatTalk("age ?").body(), "stream": stream}
    client = Client(http, started, session.key)
    server.accepting.clear()
    lost = asyncio.create_task(client.post(CHAT, body))
    await until(lambda: server.steps)
    await asyncio.sleep(0.1)  # comments of the stream pass
    await started.again(server)
    with pytest.raises(aiohttp.ClientError):
        await lost
    server.accepting.set()
    assert (await client.post(CHAT, body))[0] == 200 and len(server.steps) == 1


async def test_a_finish_that_is_in_the_journal_is_answered_again_by_a_gateway_that_has_just_begun(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession
) -> None:
    session, end = server.session(), ("/rl/sessions/x/finish", {"reward": 1.0})
    client = Client(http, started, session.key)
    assert (await client.post(*end))[0] == 200
    server.sessions.remove(session)
    started.ended.add(session.trajectory)
    await started.again()
    repeated = asyncio.create_task(client.post(*end))
    await asyncio.sleep(0.3)
    started.serve(server)
    assert (await repeated)[0] == 200


async def test_the_key_of_an_evaluation_that_has_ended_is_refused_at_once(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession
) -> None:
    session = server.session()
    session.name, session.key = "eval-0a", session_key(SECRET, "eval-0a")
    server.sessions.finished(session, "")
    assert (await Client(http, started, session.key).post(CHAT, ChatTalk("age ?").body()))[0] == 409


async def test_a_refusal_after_a_stream_has_begun_is_an_event_of_it(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calls, "KEEP_ALIVE_SECONDS", 0.02)
    session = server.session()
    server.accepting.clear()
    streaming = asyncio.create_task(Client(http, started, session.key).stream(CHAT, ChatTalk("age ?").body()))
    await until(lambda: server.steps)
    await asyncio.sleep(0.1)
    started.ended.add(session.trajectory)
    monkeypatch.setattr(gateways, "SILENT_SECONDS", 0.0)
    await server.endpoint.stop()
    said = await streaming
    assert said.startswith(policy_calls.COMMENT) and b"HTTP/1.1" not in said
    assert "has ended" in events_of(said)[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_work_elsewhere_goes_on_if_the_engine_dies_and_its_client_gets_no_error(
    server: ScriptedServer, http: aiohttp.ClientSession, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calls, "KEEP_ALIVE_SECONDS", 0.02)
    session = server.session()
    session.recorded = asyncio.get_running_loop().create_future()
    server.say = lambda prompt: RunFailed("the engine died")
    server.sampling.clear()
    waiting = asyncio.create_task(session.until_finished(60.0))
    asyncio.get_running_loop().call_later(0.1, server.sampling.set)
    with pytest.raises(aiohttp.ClientError):
        await Client(http, server, session.key).post(CHAT, {**ChatTalk("age ?").body(), "stream": stream})
    await asyncio.wait({waiting})
    assert session.moves and waiting.cancelled()
    server.sessions.remove(session)
    with pytest.raises(Refused) as unknown:
        server.sessions.find(session.key)
    assert unknown.value.status == 401, "the session has not ended"


async def test_no_generator_continues_a_session_of_an_evaluation_and_its_client_is_told(
    server: ScriptedServer, http: aiohttp.ClientSession
) -> None:
    session = server.session()
    session.trajectory = EvaluationId(3, 0)
    server.say = lambda prompt: RunFailed("the engine died")
    status, _ = await Client(http, server, session.key).post(CHAT, ChatTalk("age ?").body())
    server.sessions.remove(session)
    with pytest.raises(Refused) as ended:
        server.sessions.find(session.key)
    assert (status, ended.value.status) == (500, 409)


async def test_an_answer_that_the_gateway_lost_is_answered_again_and_an_equal_call_is_another_step(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, passed_on = [aiohttp.ServerDisconnectedError()], started.gateway._passed_on

    async def loses(*arguments: Any) -> Any:
        answer = await passed_on(*arguments)
        if losses:
            raise losses.pop()
        return answer

    monkeypatch.setattr(started.gateway, "_passed_on", loses)
    client, talk = Client(http, started, server.session().key), ChatTalk("age ?")
    assert (await client.post(CHAT, talk.body()))[0] == 200 and len(server.steps) == 1
    assert (await client.post(CHAT, talk.body()))[0] == 200 and len(server.steps) == 2


async def test_waiting_calls_of_a_session_look_for_it_together_until_the_gateway_stops(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = list[str](), started.gateway._ask

    async def count(address: str, name: str, key: str) -> int:
        asked.append(name)
        return await ask(address, name, key)

    monkeypatch.setattr(started.gateway, "_ask", count)
    session = server.session()
    server.sessions._open.clear()
    calls = [asyncio.create_task(Client(http, started, session.key).post(CHAT, {"n": n})) for n in range(20)]
    await asyncio.sleep(0.5)
    assert 1 < len(asked) < 5
    await started.gateway.stop()
    assert all(isinstance(lost, aiohttp.ClientError) for lost in await asyncio.gather(*calls, return_exceptions=True))
    assert not [task for task in asyncio.all_tasks() if "Gateway." in repr(task)]


async def test_bodies_beyond_the_gateways_room_get_503_until_others_are_answered(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "MAX_HELD_BYTES", 8000)
    monkeypatch.setattr(gateways, "MAX_OPEN_BODIES", 2)
    sessions = [server.session(number) for number in range(3)]
    one, other, third = (Client(http, started, session.key) for session in sessions)
    body = ChatTalk(f"age {'?' * 2500}").body()
    server.accepting.clear()
    waiting = [asyncio.create_task(one.post(CHAT, body))]
    await until(lambda: len(server.steps) == 1)
    assert (await one.post(CHAT, body))[0] == 503, "more than its share"
    waiting.append(asyncio.create_task(other.post(CHAT, body)))
    await until(lambda: len(server.steps) == 2)
    full = await third.answer(CHAT, body)
    assert (full.status, full.headers["Retry-After"]) == (503, "1")
    assert [session.refused[:3] for session in sessions] == ["503", "", "503"], "known before the agent may end"
    server.accepting.set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
    assert (await third.post(CHAT, body))[0] == 200 and not started.gateway._held
    assert not any(session.refused for session in sessions[1:]), "the newest call was answered"


async def test_an_answer_whose_client_has_left_is_undelivered(
    server: ScriptedServer, started: StartedGateway, http: aiohttp.ClientSession
) -> None:
    session, talk = server.session(), ChatTalk("age ?")
    client, left = Client(http, started, session.key), asyncio.Event()
    server.accepting.clear()
    leaving = asyncio.create_task(client.leave(CHAT, talk.body(), left))
    await until(lambda: server.steps)
    left.set()
    await leaving
    await asyncio.sleep(0.1)
    server.accepting.set()
    await until(lambda: server.endpoint.requests.undelivered)
    assert (await client.post(CHAT, talk.body()))[0] == 200 and len(server.steps) == 1


async def test_no_request_reaches_another_host(server: ScriptedServer, started: StartedGateway) -> None:
    key = server.session().key
    for target in ("@127.0.0.1:9/", "//127.0.0.1:9/v1/models", "http://127.0.0.1:9/v1/models"):
        reader, writer = await connected(started.address)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nx-api-key: {key}\r\n\r\n".encode())
        status = int((await reader.read()).split(b" ")[1])
        writer.close()
        assert status in (200, 400, 404), target


async def test_a_request_without_a_path_is_refused(started: StartedGateway) -> None:
    reader, writer = await connected(started.address)
    writer.write(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 404")
    writer.close()


TURNS, SESSIONS, KILLS, PAUSE = 6, 12, 100, 0.05


class Fleet:
    """Generators that are killed, of which the others open the sessions from the journal, and agents that call them.

    Every response that is sampled is another one, so that a second sampling of a step would be seen."""

    def __init__(self, chat: Chat, started: StartedGateway) -> None:
        self.chat, self.started, self.random = chat, started, random.Random(5)
        self.journal: dict[int, list[Step]] = {number: [] for number in range(SESSIONS)}
        self.servers: list[ScriptedServer] = []
        self.holder: dict[int, ScriptedServer] = {}
        self.sampled = itertools.count()
        self.killed: list[ScriptedServer] = []
        """Generators that answer nothing any more."""

    async def start(self) -> None:
        """Start one generator more."""
        server = ScriptedServer(self.chat)
        server.allowed, server.max_tokens = replace(server.allowed, max_turns=4096), 1 << 20
        server.say = lambda prompt: f"word {next(self.sampled)}"
        server.address = await server.endpoint.start("127.0.0.1", 0)
        self.servers.append(server)

    def open(self, number: int) -> None:
        """Open a session on one of the generators, from what the journal has of it."""
        server = self.holder[number] = self.random.choice(self.servers)
        session = server.session(number)
        session.restore(steps_table(self.journal[number][::-1]))
        session._sink = Journal(self, server, number)  # type: ignore[assignment]

    async def kill(self) -> None:
        """Kill a generator; its sessions are opened elsewhere a moment later."""
        server = self.servers.pop(self.random.randrange(len(self.servers)))
        moving = [number for number, holder in self.holder.items() if holder is server]
        server.endpoint.is_abandoned = True
        for session in server.sessions.open():
            session.moves = True
            session.close()
        self.killed.append(server)
        await self.start()
        self.started.gateway._generators.clear()
        self.started.serve(*self.servers)
        for number in moving:
            self.open(number)


class Journal:
    """What takes a session's steps, as long as its generator lives."""

    def __init__(self, fleet: Fleet, server: ScriptedServer, number: int) -> None:
        self.fleet, self.server, self.number = fleet, server, number

    def append(self, step: Step) -> None:
        self.step = step

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        await asyncio.sleep(self.fleet.random.random() / 50)
        if self.server not in self.fleet.servers:
            await asyncio.Event().wait()  # the buffer refuses it, and its process has died
        self.fleet.journal[self.number].append(self.step)
        await asyncio.sleep(self.fleet.random.random() / 50)
        return True


async def test_a_hundred_killed_generators_lose_no_session_and_change_no_acknowledged_token(
    bytes_chat: Chat, started: StartedGateway, http: aiohttp.ClientSession
) -> None:
    fleet = Fleet(bytes_chat, started)
    for _ in range(3):
        await fleet.start()
    started.serve(*fleet.servers)
    for number in range(SESSIONS):
        fleet.open(number)
    said: dict[int, list[str]] = {number: [] for number in range(SESSIONS)}

    async def agent(number: int, make: type[ChatTalk]) -> None:
        talk, client = make(f"task {number} ?"), Client(http, started, session_key(SECRET, f"3-{number}-0"))
        while len(fleet.killed) < KILLS or len(said[number]) < TURNS:
            status, reply = await client.post(talk.path, talk.body())
            assert status == 200, reply
            said[number].append(talk.text(reply))
            talk.answered(reply, "go on")
            await asyncio.sleep(PAUSE)
            if len(said[number]) % TURNS == 0:
                talk = make(f"task {number} goes on {len(said[number])} ?")

    async def kill() -> None:
        while len(fleet.killed) < KILLS:
            await fleet.kill()
            await asyncio.sleep(PAUSE)

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        group.create_task(kill())
        for number in range(SESSIONS):
            group.create_task(agent(number, TALKS[number % len(TALKS)]))
    for number, steps in fleet.journal.items():
        assert said[number] == [bytes_chat.text(step.response_ids[step.loss_mask][:-1]) for step in steps]
        assert [step.index for step in steps] == list(range(len(steps)))
        whole(steps)  # the references hold
    await asyncio.gather(*(server.endpoint.stop() for server in (*fleet.killed, *fleet.servers)))
