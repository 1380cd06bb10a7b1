"""An endpoint on a real port whose policy and buffer follow a script, and clients that send it raw requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO
from typing import Any

import aiohttp
import numpy as np

from service.agents.conversation_tree import ConversationTree
from service.agents.messages_and_replies import JsonCalls
from service.agents.server import Endpoint
from service.agents.session import Session
from service.agents.sessions import Sessions, session_key
from service.columns import digest
from service.rollout.chat.chat import Chat
from service.rollout.engine import AgentLimits, Generation, Sampling
from service.rollout.run_secret import RunSecret
from service.types import Int32s, Step, TrajectoryEnd, TrajectoryId
from tests.pure.rollout.conftest import generated, limits

CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SECRET = RunSecret(b"secret of this run")


class ScriptedServer:
    """An endpoint, what its policy says, and what its buffer accepts."""

    def __init__(self, chat: Chat, named_roles: tuple[str, ...] = (), structured: str = "ignore") -> None:
        self.chat = chat
        self.allowed: AgentLimits = limits(chat, max_turns=64, max_input_length=4000)
        self.allowed = replace(self.allowed, sampling=replace(self.allowed.sampling, max_tokens=200))
        self.max_tokens = 100_000
        self.say: Callable[[str], str | Generation | BaseException] = lambda prompt: "17"
        self.prompts: list[list[int]] = []
        self.most: list[int] = []
        self.samplings: list[Sampling] = []
        self.replies: list[list[int]] = []
        """Tokens that the policy sampled."""
        self.steps: list[Step] = []
        self.sampling, self.accepting = asyncio.Event(), asyncio.Event()
        """Closed, a call waits there."""
        self.sampling.set()
        self.accepting.set()
        self.accepts = True
        self.sessions = Sessions()
        self.endpoint = Endpoint(self.sessions, 4200, structured, named_roles)
        self.address = ""

    def session(self, number: int = 0) -> Session:
        """A new open session."""

        async def sample(prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
            self.prompts.append(prompt_ids.tolist())
            self.most.append(sampling.max_tokens)
            self.samplings.append(sampling)
            await self.sampling.wait()
            said = self.say(self.chat.text(prompt_ids))
            if isinstance(said, BaseException):
                raise said
            generation = said if isinstance(said, Generation) else self.sampled(said)
            self.replies.append(generation.token_ids.tolist())
            return generation

        tree = ConversationTree(self.chat, JsonCalls())
        id, name = TrajectoryId(3, number), f"3-{number}-0"
        key = session_key(SECRET, name)
        made = Session(id, "p-0", tree, self.allowed, self.max_tokens, sample, self, name, key)
        made.base_url = f"{self.address}/s/{name}/v1"
        made.recorded.set_result(True)
        self.sessions.add(made)
        return made

    def clear(self) -> None:
        """Forget what was sampled and accepted."""
        for noted in (self.steps, self.prompts, self.replies):
            noted.clear()

    @property
    def is_exact(self) -> bool:
        """Whether the steps of one session are what the engine was asked and answered."""
        sampled = sorted(step.response_ids[step.loss_mask].tolist() for step in self.steps)
        return sorted(whole(self.steps)) == sorted(self.prompts) and sampled == sorted(self.replies)

    def append(self, step: Step) -> None:
        self.steps.append(step)

    def end(self, end: TrajectoryEnd) -> None:
        raise AssertionError("a session sends no end")

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        await self.accepting.wait()
        return self.accepts

    async def connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that has sent nothing."""
        return await connected(self.address)

    def sampled(self, text: str) -> Generation:
        """Tokens of a response that no tokenizer would choose: one for each character."""
        ids = [token for letter in text for token in self.chat.plain(letter).tolist()]
        return generated([*ids, self.chat.end_id])


@asynccontextmanager
async def opened(
    chat: Chat, named_roles: tuple[str, ...] = (), structured: str = "ignore", host: str = "127.0.0.1"
) -> AsyncIterator[ScriptedServer]:
    """A server whose endpoint listens."""
    server = ScriptedServer(chat, named_roles, structured)
    server.address = await server.endpoint.start(host, 0)
    try:
        yield server
    finally:
        await server.endpoint.stop()


class Client:
    """Sends requests with one key; keeps nothing."""

    def __init__(self, http: aiohttp.ClientSession, server: Any, key: str) -> None:
        self._http, self._server = http, server
        self.headers = {"Authorization": f"Bearer {key}"}

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and JSON of the answer, or its events; `body` may be bytes."""
        data = BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(self._server.address + path, data=data, headers=sent) as answer:
            raw = await answer.read()
            is_stream = answer.content_type == "text/event-stream"
            return answer.status, events_of(raw) if is_stream else json.loads(raw, parse_constant=_refuse)

    async def answer(self, path: str, body: Any) -> aiohttp.ClientResponse:
        """The answer with its headers; its body is read."""
        async with self._http.post(self._server.address + path, json=body, headers=self.headers) as answer:
            await answer.read()
            return answer

    async def stream(self, path: str, body: Any) -> bytes:
        """The bytes of a streamed answer."""
        url = self._server.address + path
        async with self._http.post(url, json={**body, "stream": True}, headers=self.headers) as answer:
            return await answer.read()

    async def leave(self, path: str, body: Any, when: asyncio.Event) -> None:
        """Send a request, and close the connection at `when` without reading an answer."""
        raw = json.dumps(body).encode()
        _, writer = await connected(self._server.address)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {self.headers['Authorization']}\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await writer.drain()
        await when.wait()
        writer.transport.abort()


@asynccontextmanager
async def client_of(server: ScriptedServer, session: Session) -> AsyncIterator[Client]:
    """A client with the key of a session."""
    async with aiohttp.ClientSession() as http:
        yield Client(http, server, session.key)


async def connected(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent nothing."""
    host, port = address.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def until(seen: Callable[[], Any]) -> None:
    """Wait for a moment that comes; the test's own timeout is the deadline."""
    while not seen():
        await asyncio.sleep(0.001)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each frame that has one."""
    frames = [frame for frame in stream.decode().split("\n\n") if frame and not frame.startswith(":")]
    data = [frame.rpartition("data: ")[2] for frame in frames]
    return [json.loads(one, parse_constant=_refuse) for one in data if one != "[DONE]"]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def whole(steps: list[Step]) -> list[list[int]]:
    """The whole prompt of every step; fails where a reference does not hold."""
    known: list[list[int]] = []
    prompts = []
    for step in sorted(steps, key=lambda step: step.index):
        before: list[int] = []
        if step.extends is not None:
            before = known[step.extends.step][: step.extends.length]
            if (len(before), digest(np.array(before, np.int32))) != step.extends[1:]:
                raise AssertionError(f"step {step.index} extends other tokens than {step.extends}")
        prompts.append([*before, *step.prompt_ids.tolist()])
        known.append([*prompts[-1], *step.response_ids.tolist()])
    return prompts
