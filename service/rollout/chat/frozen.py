"""Sends the conversations of a run's frozen roles, as text, to the models that play these roles.

    conversation of the role -> POST {url}/chat/completions -> text

The turn of a frozen model is recorded in tokens of the policy's tokenizer. These tokens carry no loss.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import aiohttp
import msgspec

from service.backoff import Backoff, retried
from service.config.rollout import RoleConfig
from service.errors import UserError
from service.handoff.steps.values import StopReason
from service.observe.metrics import Metrics
from service.rollout.engine import Sampling
from service.rollout.environment import Message, TrajectoryFailed

BACKOFF = Backoff(0.2)
OK = 200
AGAIN = (408, 429, 500, 502, 503, 504)
"""After these HTTP statuses a request is sent again, until its deadline."""
ANSWER_BYTES = 4 << 20
"""Maximum bytes of a model's answer."""


class FrozenModels:
    """Queries the models of frozen roles, over connections that all trajectories of a generator share."""

    def __init__(self, roles: Mapping[str, RoleConfig]) -> None:
        """Raises `UserError` if a key file cannot be read, or contains no key."""
        self._roles = {name: role for name, role in roles.items() if role.mode == "frozen"}
        self._headers = {name: key_header(f"roles.{name}.key_file", of.key_file) for name, of in self._roles.items()}
        self._session: aiohttp.ClientSession | None = None
        self._counts = Counter[tuple[str, str]]()
        """Number of requests by role and outcome."""
        self._seconds = dict.fromkeys(self._roles, 0.0)

    def measure(self, metrics: Metrics) -> None:
        """Record metrics of the requests to the models: their number and duration."""
        for role in self._roles:
            for outcome in ("answered", "failed"):
                metrics.count_to(
                    "baton_frozen_role_turns_total", self._counts[role, outcome], step_role=role, outcome=outcome
                )
            metrics.count_to("baton_frozen_role_seconds_total", self._seconds[role], step_role=role)

    def __contains__(self, role: str) -> bool:
        return role in self._roles

    async def answer(self, role: str, messages: Sequence[Message], sampling: Sampling, deadline: float) -> str:
        """Ask the model of a role for the role's next message in a conversation.

        Raises:
            TrajectoryFailed: the model does not answer within `deadline` seconds, refuses, or answers without a text.
        """
        began, last, outcome = time.monotonic(), "no answer", "failed"

        def failed(error: Exception) -> None:
            nonlocal last
            last = f"{type(error).__name__}: {error}" if isinstance(error, aiohttp.ClientError) else str(error)

        try:
            async with asyncio.timeout(deadline) as scope:
                ask = partial(self._asked, role, messages, sampling)
                text = await retried(ask, (aiohttp.ClientError, ConnectionError), BACKOFF, failed=failed)
            outcome = "answered"
        except TimeoutError as error:
            if not scope.expired():
                raise
            late = f"roles.{role}: {self._roles[role].url} gave no answer within {deadline:g} s, at last {last}"
            raise TrajectoryFailed(StopReason.ENVIRONMENT_TIMEOUT, late) from error
        finally:
            self._seconds[role] += time.monotonic() - began
            self._counts[role, outcome] += 1
        return text

    async def _asked(self, role: str, messages: Sequence[Message], sampling: Sampling) -> str:
        """Send one request; raises `aiohttp.ClientError` or ConnectionError if it may be retried."""
        asked = self._roles[role]
        body = {
            "model": asked.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }
        if self._session is None:
            # The deadline of `answer` bounds a request; the number of played trajectories bounds the number of
            # requests.
            without = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(timeout=without, connector=aiohttp.TCPConnector(limit=0))
        url, headers = f"{asked.url}/chat/completions", self._headers[role]
        async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as response:
            status, answer = response.status, await whole_body(response, ANSWER_BYTES)
        if status in AGAIN:
            raise ConnectionError(f"status {status}")
        return _text(role, status, answer)

    async def close(self) -> None:
        """Close the connections to the models."""
        if self._session is not None:
            await self._session.close()


def _text(role: str, status: int, answer: bytes | None) -> str:
    try:
        text = msgspec.json.decode(answer or b"")["choices"][0]["message"]["content"]
    except (msgspec.MsgspecError, UnicodeDecodeError, LookupError, TypeError, RecursionError):
        text = None
    if status != OK or not isinstance(text, str):
        what = f"more than {ANSWER_BYTES} bytes" if answer is None else repr(answer[:200])
        said = f"roles.{role} answered without a text, but with status {status} and {what}"
        raise TrajectoryFailed(StopReason.ENVIRONMENT_OUTPUT, said)
    return text


def key_header(setting: str, file: Path | None) -> dict[str, str]:
    """The HTTP headers with the key that is read from a file; no headers without a file.

    Raises:
        UserError: the file cannot be read, or contains no key.
    """
    if file is None:
        return {}
    try:
        key = file.read_text("ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"{setting}: {file} cannot be read as text of ASCII: {error}") from error
    if not key or not key.isprintable():
        raise UserError(f"{setting}: {file} holds no key; a key is one line of printable characters")
    return {"Authorization": f"Bearer {key}"}


async def whole_body(response: aiohttp.ClientResponse, most_bytes: int) -> bytes | None:
    """The whole body of a response; None if it has more than `most_bytes` bytes."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > most_bytes:
            return None
    return bytes(body)
