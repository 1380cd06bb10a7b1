"""Keys, bodies and connections of the endpoint: what a client may send, and what it may hold open."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import zlib
from collections.abc import Callable
from contextlib import AsyncExitStack

import aiohttp
import psutil
import pytest

from service.agents import listening, requests
from service.agents.session import BYTES_PER_TOKEN, MIN_BODY_BYTES, Session
from service.handoff.steps.values import StopReason
from service.rollout.chat.chat import Chat
from tests.pure.agents.endpoint import CHAT, MESSAGES, Client, ScriptedServer, client_of, opened
from tests.pure.agents.talks import ALL, TALKS, ChatTalk


@ALL
async def test_an_unknown_or_missing_key_is_refused_and_nothing_is_filed(
    server: ScriptedServer, session: Session, client: Client, make: type[ChatTalk]
) -> None:
    talk = make("age ?")
    for headers in (
        {},
        {"Authorization": "Bearer "},
        {"x-api-key": session.key[:-1]},
        {"Authorization": session.key},
    ):
        client.headers = headers
        status, reply = await client.post(f"/s/0{talk.path}", talk.body())
        assert status == 401 and talk.error(reply)
    client.headers = {"x-api-key": session.key}
    assert (await client.post(f"/s/{server.session(1).name}{talk.path}", talk.body()))[0] == 200, "the key decides"
    session.finish(1.0)
    assert (await client.post(talk.path, talk.body()))[0] == 409
    server.sessions.remove(session)
    assert (await client.post(talk.path, talk.body()))[0] == 409
    assert len(server.steps) == 1 and session.ended.result().reward == 1.0


async def test_no_key_reaches_a_log(
    server: ScriptedServer, session: Session, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server.say = lambda prompt: RuntimeError("a bug")
    with pytest.raises(aiohttp.ClientError):
        await client.post(CHAT, ChatTalk("age ?").body())
    for line in (f"Authorization: Bearer {session.key}\x00", f"Authorization {session.key}", f"{session.key}\r: x"):
        reader, writer = await server.connected()
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
        await reader.read()
        writer.close()
    other = server.session(1)
    async with client_of(server, other) as http:
        assert (await http.post(CHAT, {"messages": [{"role": other.key, "content": "age ?"}]}))[0] == 400
        assert (await http.post(CHAT, {}, User_Agent=f"an agent with {other.key}"))[0] == 400
    assert "Invalid enum value '[key]'" in caplog.text and "(client an agent with [key])" in caplog.text
    assert "a bug" in caplog.text and session.key not in caplog.text


NUMBERS = (b'{"x": NaN}', b'{"x": 1e999}', b'{"x": ' + b"9" * 5000 + b"}")
"""No JSON, or beyond every float."""


async def test_a_body_that_is_no_json_object_is_refused(session: Session, client: Client) -> None:
    for raw in (b"", b"{", b"[]", b"\xff", b'{"a":' * 5000, b"null", b'{"messages": 5}', *NUMBERS):
        status, reply = await client.post(CHAT, raw)
        assert status == 400 and set(reply) == {"error"}, raw[:10]
    assert session.n_steps == 0


async def test_a_body_with_more_bytes_than_any_prompt_is_refused_before_it_is_parsed(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    most = MIN_BODY_BYTES + BYTES_PER_TOKEN * server.allowed.max_input_length
    for path in (f"{MESSAGES}/count_tokens", "/rl/sessions/0/finish", "/rl/sessions/0/reward"):
        status, reply = await client.post(path, b"{" * (max(most, requests.MAX_END_BYTES) + 1))
        assert status == 413 and "bytes" in reply["error"]["message"]
    assert session.stop_reason == StopReason.STOP, "no call was refused"
    for path in (CHAT, "/v1/responses"):
        status, reply = await client.post(path, b"{" * (most + 1))
        assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert session.stop_reason == StopReason.LENGTH
    talk = ChatTalk("age ?")
    body = json.dumps(talk.body()).encode()
    assert (await client.post(CHAT, body.ljust(most)))[0] == 200
    assert session.stop_reason == StopReason.STOP


async def test_a_large_body_waits_for_room_and_is_refused_as_one_to_repeat_when_there_is_none(
    bytes_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_OPEN_BODIES", 1)
    monkeypatch.setattr(requests, "ROOM_SECONDS", 0.3)
    async with opened(bytes_chat) as server:
        session, talk = server.session(), ChatTalk("age ?")
        small = json.dumps(talk.body()).encode()
        large = small.ljust(60_000)
        async with client_of(server, session) as client:
            reader, writer = await server.connected()
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
            writer.write(f"{head}Content-Length: {len(large)}\r\n\r\n".encode() + large[:-1])
            await writer.drain()
            while (await client.post(CHAT, large))[0] == 200:
                pass
            for make in TALKS:
                late = make("age ?")
                status, reply = await client.post(make.path, json.dumps(late.body()).encode().ljust(60_000))
                assert status == requests.NO_ROOM and "in the way" in late.error(reply)
            assert (await client.post(CHAT, small))[0] == 200
            monkeypatch.setattr(requests, "ROOM_SECONDS", 60.0)
            waiting = asyncio.create_task(client.post(CHAT, large))
            writer.write(large[-1:])
            assert (await waiting)[0] == 200 and b"200 OK" in await reader.readline()
            writer.close()


@pytest.mark.parametrize(
    ("encoding", "pack", "status"),
    [
        ("gzip", gzip.compress, 200),
        ("Deflate", zlib.compress, 200),
        ("identity", bytes, 200),
        ("gzip", bytes, 400),
    ],
)
async def test_a_compressed_body_is_read(
    client: Client, encoding: str, pack: Callable[[bytes], bytes], status: int
) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "age?"}]}).encode()
    assert (await client.post(CHAT, pack(body), Content_Encoding=encoding))[0] == status


async def test_a_body_that_would_unpack_to_gigabytes_is_refused_without_unpacking_it(client: Client) -> None:
    packer, empty = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(1 << 20)
    begin, again = (packer.compress(empty) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    bomb, memory = begin + 3000 * again, psutil.Process().memory_info
    before = memory().rss
    for path, status in ((CHAT, 400), ("/rl/sessions/0/finish", 413)):
        assert (await client.post(path, bomb, Content_Encoding="gzip"))[0] == status
    assert memory().rss - before < 256 << 20


async def test_clients_that_never_read_hold_neither_memory_nor_connections(
    bytes_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "UNREAD_SECONDS", 0.5)
    async with asyncio.timeout(30), opened(bytes_chat) as server:
        session, memory = server.session(), psutil.Process().memory_info
        server.say = lambda prompt: "x" * 190
        async with client_of(server, session) as client:
            assert (await client.post(CHAT, ChatTalk("age ?").body()))[0] == 200
            before = memory().rss
            unread = [Unread(server, session, stream) for stream in (True, False) * 4]
            cut = [False]
            while not all(cut):
                cut = [one.is_cut() for one in unread]
                assert (await client.post(CHAT, ChatTalk("age ?").body()))[0] == 200
                assert memory().rss - before < UNREAD_BYTES
            for one in unread:
                one.close()


UNREAD_BYTES = 64 << 20


class Unread(socket.socket):
    """A client that asks for the same call again and again, and reads no answer."""

    def __init__(self, server: ScriptedServer, session: Session, stream: bool) -> None:
        super().__init__()
        body = json.dumps({**ChatTalk("age ?").body(), "stream": stream})
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        self.request = self.rest = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode() * 100
        self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        self.connect(("127.0.0.1", int(server.address.rpartition(":")[2])))
        self.setblocking(False)

    def is_cut(self) -> bool:
        """Whether the server has closed the connection; else sends what it takes."""
        try:
            self.rest = self.rest[self.send(self.rest) :] or self.request
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        return False


async def test_a_connection_is_closed_when_it_idles_and_after_a_key_of_no_open_session(
    bytes_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "IDLE_SECONDS", 0.5)
    async with asyncio.timeout(30), opened(bytes_chat) as server:
        session, ended = server.session(), server.session(1)
        server.sessions.remove(ended)
        for path, key, closed in (
            ("/v1/models", session.key, False),
            ("/v1/models", "unknown", True),
            ("/v1/models", ended.key, True),
            ("/nowhere", session.key, True),
        ):
            reader, writer = await server.connected()
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            answer = await reader.read()  # until the endpoint closes the connection
            writer.close()
            assert (b"Connection: close" in answer) is closed


async def test_one_session_cannot_hold_the_room_of_all_others(
    bytes_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "MAX_CONNECTIONS", 8)
    monkeypatch.setattr(requests, "MAX_OPEN_BODIES", 4)
    monkeypatch.setattr(requests, "ROOM_SECONDS", 5.0)
    async with asyncio.timeout(60), opened(bytes_chat) as server, AsyncExitStack() as held:
        greedy, honest = server.session(), server.session(1)
        head = f"Host: x\r\nAuthorization: Bearer {greedy.key}\r\n"
        asks = (
            f"GET /v1/models HTTP/1.1\r\n{head}\r\n",
            f"POST {CHAT} HTTP/1.1\r\n{head}Content-Length: 60000\r\n\r\n",
            "",
        )
        large = json.dumps(ChatTalk("age ?").body()).encode().ljust(60_000)
        for asked in asks:  # connections that are kept, bodies that never come, connections without a request
            for _ in range(20):
                reader, writer = await server.connected()
                held.callback(writer.close)
                writer.write(asked.encode())
                if asked.startswith("GET"):
                    assert b"200 OK" in await reader.readline()
            async with client_of(server, honest) as client:
                assert (await client.post(CHAT, large))[0] == 200


async def test_a_connection_that_sends_nothing_is_closed_and_one_that_asked_stays(
    bytes_chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "FIRST_SECONDS", 0.2)
    async with asyncio.timeout(60), opened(bytes_chat) as server:
        session, talk = server.session(), ChatTalk("age ?")
        reader, writer = await server.connected()
        writer.write(b"POST / HTTP/1.1\r\n")
        server.sampling.clear()
        async with client_of(server, session) as client:
            asked = asyncio.create_task(client.post(CHAT, talk.body()))
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            await asyncio.sleep(0.3)
            server.sampling.set()
            assert (await asked)[0] == 200
        writer.close()
