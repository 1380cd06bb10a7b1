"""Workers on other machines: sessions are claimed, run, and finished or aborted, whatever the endpoint does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from service.agents.runner.runner import AgentRunner
from service.agents.worker import work
from service.cli.parser import main, split_overrides
from service.config.command import CommandConfig
from service.errors import UserError
from service.rollout.environment import Message, Task
from tests.pure.agents.test_runner import LeftOver

KEY = "key-of-the-workers"
SESSION_KEY = "key-of-a-session"
MARK = "BATON_TEST_AGENT"
ECHO = ("sh", "-c", "cat; echo; echo $OPENAI_API_KEY; env | grep -c WORKER; true")
SLEEP = ("sleep", "600")
ODD: list[dict[str, Any]] = [
    {"session": None}, {"session": "../../v1/models?"}, {"session": "x" * 200}, {"session": "a\nb"}, {"task": []},
    {"task": {"uid": "p"}}, {"task": {"uid": "p", "prompt": [{"role": 1}], "env_class": ""}}, {"seed": "7"},
    {"deadline": "soon"}, {"deadline": -1}, {"base_url": "file:///etc"}, {"base_url": "http://[x"}, {"api_key": 7},
]  # fmt: skip


class FakeEndpoint:
    """Gives out sessions and notes what workers post."""

    def __init__(self, sessions: int, deadline: float = 600.0) -> None:
        self.url = ""
        self.posts: list[tuple[str, Any]] = []
        self.faults: list[str] = []
        """What becomes of the next `finish` requests."""
        self.over = False
        self.refuses = 200
        """Status of further `finish` requests."""
        self.odd: list[dict[str, Any]] = []
        """What the next claims say instead."""
        self.posted = asyncio.Condition()
        self._deadline = deadline
        self._waiting = list(range(sessions))

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "it is another"}}, status=401)
        path, body = request.match_info["path"], await request.json()
        async with self.posted:
            self.posts.append((path, body))
            self.posted.notify_all()
        if path == "claim":
            return self._claim()
        if path.endswith("/finish") and self.faults:
            if self.faults.pop(0) == "lost" and request.transport is not None:
                request.transport.abort()
            return web.Response(status=503, text="busy")
        return web.json_response({}, status=409 if self.over else self.refuses if path.endswith("/finish") else 200)

    def _claim(self) -> web.Response:
        if not self._waiting:
            return web.Response(status=204)
        number = self._waiting.pop(0)
        task = Task(f"p{number}", (Message(role="user", content=f"question {number}"),), "")
        claim: dict[str, Any] = {
            "session": f"s{number}",
            "base_url": f"{self.url}/s/s{number}/v1",
            "api_key": SESSION_KEY,
            "seed": 7,
        }
        claim |= {"task": {**asdict(task), "later": 1}, "deadline": self._deadline, "sampling": {}}
        return web.json_response({**claim, **self.odd.pop(0)} if self.odd else claim)

    async def post(self, path: str, count: int = 1) -> list[Any]:
        """The bodies of the first posts to a path, once there are so many."""
        async with asyncio.timeout(60), self.posted:
            await self.posted.wait_for(lambda: len(self.of(path)) >= count)
        return self.of(path)

    def of(self, path: str) -> list[Any]:
        return [body for posted, body in self.posts if posted == path]


@asynccontextmanager
async def serving(sessions: int, **more: Any) -> AsyncIterator[FakeEndpoint]:
    endpoint = FakeEndpoint(sessions, **more)
    app = web.Application()
    app.router.add_post("/rl/{path:.*}", endpoint.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield endpoint
    finally:
        await runner.cleanup()


@asynccontextmanager
async def working(
    endpoint: FakeEndpoint, command: Sequence[str], key: str = KEY, **settings: Any
) -> AsyncIterator[Any]:
    """A worker that serves the endpoint; stopped at the end of the block."""
    runner = AgentRunner(CommandConfig(command=tuple(command), **settings))
    task = asyncio.create_task(work([endpoint.url + "/"], key, runner, concurrent=2))
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, UserError):
            await task
        await runner.close()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"HEARTBEAT_SECONDS": 0.05, "MIN_CLAIM_SECONDS": 0.05, "FIRST_PAUSE": 0.02}.items():
        monkeypatch.setattr(f"service.agents.worker.{name}", seconds)


async def test_sessions_are_claimed_run_scored_and_finished() -> None:
    async with serving(3) as endpoint, working(endpoint, ECHO, score=("sh", "-c", "echo 0.5")):
        for number in range(3):
            (finish,) = await endpoint.post(f"sessions/s{number}/finish")
            assert (finish["reward"], finish["status"], finish["reason"]) == (0.5, "ok", "")
            assert finish["transcript"] == f"question {number}\n[key]\n0\n"
            assert endpoint.of(f"sessions/s{number}/heartbeat")
        assert not [path for path, _ in endpoint.posts if path.endswith("/abort")]


async def test_a_finish_is_sent_again_until_it_is_answered() -> None:
    async with serving(1) as endpoint, working(endpoint, ECHO):
        endpoint.faults = ["lost", "busy", "lost"]
        first, *again = await endpoint.post("sessions/s0/finish", 4)
        assert again == [first] * 3


async def test_a_session_that_is_over_ends_its_run_and_the_worker_goes_on(left_over: LeftOver) -> None:
    variables = {MARK: "over"}
    async with serving(2) as endpoint, working(endpoint, SLEEP, variables=variables):
        await endpoint.post("sessions/s1/heartbeat", 2)
        endpoint.over = True
        claims = len(endpoint.of("claim"))
        await endpoint.post("claim", claims + 1)
        assert not [path for path, _ in endpoint.posts if path.endswith(("/finish", "/abort"))]
    assert left_over(MARK, "over", 0.0) == {}


async def test_a_run_beyond_the_deadline_of_its_session_ends_as_failed() -> None:
    async with serving(1, deadline=0.5) as endpoint, working(endpoint, SLEEP):
        (finish,) = await endpoint.post("sessions/s0/finish")
        assert (finish["reward"], finish["status"], finish["reason"]) == (None, "failed", "no result after 0.5 s")


async def test_odd_claims_are_left_alone_each_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(1 + len(ODD)) as endpoint:
        endpoint.odd = list(ODD)
        async with working(endpoint, ECHO):
            await endpoint.post(f"sessions/s{len(ODD)}/finish")
    assert not [path for path, _ in endpoint.posts if path not in ("claim",) and f"/s{len(ODD)}/" not in f"/{path}"]
    lines = [record.getMessage() for record in caplog.records if "odd claim" in record.getMessage()]
    assert len(lines) == len(ODD) and not any("\n" in line or len(line) > 400 for line in lines)


async def test_a_finish_that_is_refused_costs_its_session_only() -> None:
    async with serving(2) as endpoint, working(endpoint, ECHO) as worker:
        endpoint.refuses = 413
        for number in range(2):
            await endpoint.post(f"sessions/s{number}/finish")
        claims = len(endpoint.of("claim"))
        await endpoint.post("claim", claims + 2)
        assert not worker.done()
        assert [len(endpoint.of(f"sessions/s{number}/finish")) for number in range(2)] == [1, 1]


async def test_a_worker_with_a_wrong_key_ends_with_the_reason() -> None:
    async with serving(1) as endpoint, working(endpoint, ECHO, key="wrong") as worker:
        with pytest.raises(UserError, match=r"refuses the worker key: it is another$"):
            await worker
    assert endpoint.posts == []


async def test_the_command_works_until_a_signal_and_then_aborts_its_session(
    tmp_path: Path, left_over: LeftOver
) -> None:
    environment = {**os.environ, "BATON_WORKER_KEY": KEY, "TMPDIR": str(tmp_path)}
    async with serving(1) as endpoint:
        command = ["agent-worker", endpoint.url, f"env.variables={{{MARK}: worker}}", "--command", *SLEEP]
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "service", *command, env=environment, stderr=subprocess.PIPE
        )
        await endpoint.post("sessions/s0/heartbeat")
        worker.send_signal(signal.SIGTERM)
        _, errors = await worker.communicate()
        assert worker.returncode == 128 + signal.SIGTERM, errors
        assert endpoint.of("sessions/s0/abort") == [{}]
    assert left_over(MARK, "worker", 0.0) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["http://127.0.0.1:9"], "env.command: is empty"),
        (["127.0.0.1:9", "--command", "true"], "127.0.0.1:9: no address of an endpoint"),
        (["http://127.0.0.1:9", "--command", "no-such-agent"], "there is no program 'no-such-agent' on this machine"),
        (["http://127.0.0.1:9", "env.scor=x", "--command", "true"], "unknown key (did you mean env.score?)"),
        (["http://127.0.0.1:9", "env.score=a:b", "--command", "true"], "env.trusted_modules does not name 'a'"),
    ],
)
def test_wrong_input_of_the_command_is_one_line(
    words: list[str], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_WORKER_KEY", KEY)
    assert main(["agent-worker", *words]) == 2
    errors = capsys.readouterr().err
    assert line in errors and errors.count("\n") == 1 and KEY not in errors


def test_the_command_needs_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent-worker", "http://127.0.0.1:9", "--command", "true"]) == 2
    assert "BATON_WORKER_KEY is not set" in capsys.readouterr().err


def test_what_follows_the_command_option_is_no_setting() -> None:
    words = ["agent-worker", "http://h:1", "env.network=open", "--command", "codex", "-c", "a.b=c", "--x.y", "z"]
    assert split_overrides(words) == ([*words[:2], *words[3:]], ["env.network=open"])
