"""Runs agents on a machine without Ray: claims sessions from endpoints over HTTP, runs the command for each, and
finishes the sessions.

    POST URL/rl/claim                    -> {session, base_url, api_key, task, seed, deadline}, or 204: nothing to do
    POST URL/rl/sessions/ID/heartbeat    every few seconds; 404, 409 or 410: the session is over, so its run is ended
    POST URL/rl/sessions/ID/finish       {reward, status, reason, info, transcript, exit_code}
    POST URL/rl/sessions/ID/abort        {}, when the worker is stopped

A request whose answer is lost is sent again: an endpoint treats a request with an equal body as a repetition.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from service.agents.runner.command_process import Finished
from service.agents.runner.runner import AgentRunner
from service.backoff import Backoff, retried
from service.errors import UserError, in_one_line, last_lines
from service.rollout.environment import Task

log = logging.getLogger(__name__)

REQUEST_SECONDS = 120.0
"""Time limit of one request, in seconds; an endpoint without work may keep a claim waiting."""
HEARTBEAT_SECONDS = 10.0
"""Maximum seconds between two heartbeats; at least `HEARTBEATS` are sent within the claim's heartbeat deadline."""
HEARTBEATS = 4
MIN_CLAIM_SECONDS = 1.0
"""Minimum seconds from the start of a claim that got no session to the start of the next claim."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""First and longest backoff, in seconds, after a request that got no answer."""
ABORT_SECONDS = 5.0
SHOWN = 200
"""Maximum characters of an endpoint's answer that a message repeats."""

OVER = (404, 409, 410)
"""HTTP statuses of a session that is no longer open."""
SESSION_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z"
"""A name that can be part of an address without escapes."""
MAX_TRANSCRIPT = 64 << 10
"""Maximum characters of a transcript that a worker sends (a character has at most 12 bytes as JSON); of a longer
transcript only the end is sent."""


class _Unanswered(Exception):
    """An endpoint did not answer a request, or asked to retry later."""


class SessionClaim(msgspec.Struct):
    """The answer to a claim: a session to run the agent for. Other fields of the answer are ignored."""

    session: Annotated[str, msgspec.Meta(pattern=SESSION_NAME)]
    base_url: str
    api_key: str
    task: Task
    seed: int
    deadline: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    heartbeat_deadline: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = HEARTBEATS * HEARTBEAT_SECONDS


async def work(urls: Sequence[str], key: str, runner: AgentRunner, concurrent: int) -> None:
    """Claim and run up to `concurrent` sessions of each endpoint at once; on cancellation, abort the open sessions.

    `key`: the worker key of the endpoints.

    Raises:
        UserError: an address refuses the key, or is not an endpoint.
    """
    headers, limit = {"Authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=limit) as http:
        endpoints = [_Endpoint(url.rstrip("/"), http, runner) for url in urls]
        serving = [asyncio.create_task(one.serve()) for one in endpoints for _ in range(concurrent)]
        try:
            await asyncio.gather(*serving)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)


class _Endpoint:
    def __init__(self, url: str, http: aiohttp.ClientSession, runner: AgentRunner) -> None:
        self._url = url
        self._http = http
        self._runner = runner
        self._is_silent = False

    async def serve(self) -> None:
        """Claim and run one session after the other."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            if (claim := await self._claim()) is not None:
                await self._play(claim)
            else:
                await asyncio.sleep(began + MIN_CLAIM_SECONDS - loop.time())

    async def _claim(self) -> SessionClaim | None:
        """Claim a session; None if there is none, or the worker cannot run the session in the answer.

        Raises:
            UserError: the address is not an endpoint.
        """
        status, text = await self._post("claim", {})
        if status >= 300:
            raise UserError(f"{self._url}/rl/claim: refused with status {status}{_why(text)}")
        try:
            answer = json.loads(text) if text else None
        except (ValueError, RecursionError):
            answer = text
        if not isinstance(answer, dict | None):
            raise UserError(f"{self._url} is no endpoint of Baton: it answers {in_one_line(text)[:SHOWN]}")
        if answer is None:
            return None
        try:
            claim = msgspec.convert(answer, SessionClaim)
            if urlsplit(claim.base_url).scheme not in ("http", "https"):
                raise ValueError("base_url is no address")
        except (msgspec.ValidationError, ValueError, RecursionError) as odd:
            log.warning("%s: an odd claim is left alone: %s", self._url, in_one_line(str(odd))[:SHOWN])
            return None
        return claim

    async def _play(self, claim: SessionClaim) -> None:
        """Run a session and finish it, unless the session was over before."""
        session = f"sessions/{claim.session}"
        run = asyncio.create_task(self._runner.run(claim.task, claim.base_url, claim.api_key, claim.seed))
        beating = asyncio.create_task(self._beat_until_over(session, claim.heartbeat_deadline / HEARTBEATS))
        try:
            await asyncio.wait({run, beating}, timeout=claim.deadline, return_when=asyncio.FIRST_COMPLETED)
            if beating.done():
                beating.result()
                log.warning("%s is over: its run is ended", session)
                return
            late = Finished(None, "failed", f"no result after {claim.deadline:g} s", {}, "")
            finished = run.result() if run.done() else late
            if finished.reason:
                why = in_one_line(finished.reason) + last_lines(finished.transcript)
                log.warning("%s %s: %s", session, finished.status, why)
            finished = finished._replace(transcript=finished.transcript[-MAX_TRANSCRIPT:])
            await self._is_open(f"{session}/finish", finished._asdict())
        except asyncio.CancelledError:
            with suppress(TimeoutError, UserError):  # the endpoint notices the missing heartbeats
                async with asyncio.timeout(ABORT_SECONDS):
                    await self._is_open(f"{session}/abort", {})
            raise
        finally:
            run.cancel()
            beating.cancel()
            await asyncio.gather(run, beating, return_exceptions=True)

    async def _beat_until_over(self, session: str, seconds: float) -> None:
        seconds = min(seconds, HEARTBEAT_SECONDS)
        while await self._is_open(f"{session}/heartbeat", {}, longest_pause=seconds):
            await asyncio.sleep(seconds)

    async def _is_open(self, path: str, body: Mapping[str, Any], longest_pause: float = LONGEST_PAUSE) -> bool:
        """Send a request about a session; returns whether the session was still open for it."""
        status, text = await self._post(path, body, longest_pause)
        if status >= 300 and status not in OVER:
            log.warning("%s/rl/%s: refused with status %d%s", self._url, path, status, _why(text))
        return status < 300

    async def _post(self, path: str, body: Mapping[str, Any], longest_pause: float = LONGEST_PAUSE) -> tuple[int, str]:
        """Retry a request until it is answered; returns the answer's status and text.

        Raises:
            UserError: the endpoint refuses the key.
        """
        backoff = Backoff(FIRST_PAUSE, longest_pause)
        status, text = await retried(partial(self._sent, path, body), _Unanswered, backoff, failed=self._warn_once)
        self._is_silent = False
        if status in (401, 403):
            raise UserError(f"{self._url}: the endpoint refuses the worker key{_why(text)}")
        return status, text

    async def _sent(self, path: str, body: Mapping[str, Any]) -> tuple[int, str]:
        try:
            async with self._http.post(f"{self._url}/rl/{path}", json=body) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Unanswered(str(error) or type(error).__name__) from error
        if response.status >= 500 or response.status == 429:
            raise _Unanswered(f"status {response.status}")
        return response.status, text

    def _warn_once(self, problem: _Unanswered) -> None:
        if not self._is_silent:
            log.warning("%s does not answer (%s); asking again", self._url, in_one_line(str(problem)))
        self._is_silent = True


def _why(text: str) -> str:
    """An endpoint's reason for a refusal, as a suffix for messages."""
    with suppress(ValueError, RecursionError, TypeError, LookupError):  # otherwise the text is quoted unchanged
        text = str(json.loads(text)["error"]["message"])
    return f": {in_one_line(text)[:SHOWN]}" if text else ""
