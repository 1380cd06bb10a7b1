"""The models that play a run's frozen roles: they are asked in text, at an OpenAI-compatible endpoint each.

    conversation of the role -> POST {url}/chat/completions -> text

Whatever the model's own tokens are, its turn is kept in those of the policy, without loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import numpy as np

from service.config.rollout import RoleConfig
from service.handoff.steps.stop_reason import StopReason
from service.rollout.chat.chat import Chat
from service.rollout.chat.outside import key_header, whole_body
from service.rollout.engine import Generation, Sampling
from service.rollout.env_guard import TrajectoryFailed
from service.rollout.environment import Message
from service.types import NO_VERSION

FIRST_PAUSE = 0.2
"""Seconds before the second attempt; each further pause is twice as long."""
OK = 200
AGAIN = (408, 429, 500, 502, 503, 504)
"""Statuses after which a request is sent again, until its deadline."""
ANSWER_BYTES = 4 << 20
"""Most bytes of an answer."""


class FrozenModels:
    """Asks the models of frozen roles; one set of connections for a generator."""

    def __init__(self, roles: Mapping[str, RoleConfig]) -> None:
        """Raises a UserError where a file holds no key that can be read."""
        self._roles = {name: role for name, role in roles.items() if role.mode == "frozen"}
        self._headers = {name: key_header(f"roles.{name}.key_file", of.key_file) for name, of in self._roles.items()}
        self._session: aiohttp.ClientSession | None = None

    def __contains__(self, role: str) -> bool:
        return role in self._roles

    async def answer(self, role: str, messages: Sequence[Message], sampling: Sampling, deadline: float) -> str:
        """What a role's model says next in a conversation.

        Raises:
            TrajectoryFailed: it does not answer within `deadline` seconds, refuses, or answers without a text.
        """
        asked, last, pause = self._roles[role], "no answer", FIRST_PAUSE
        body = {
            "model": asked.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }
        try:
            async with asyncio.timeout(deadline) as scope:
                while True:
                    try:
                        status, answer = await self._post(f"{asked.url}/chat/completions", body, self._headers[role])
                        if status not in AGAIN:
                            return _text(role, status, answer)
                        last = f"status {status}"
                    except aiohttp.ClientError as error:
                        last = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(pause)
                    pause *= 2
        except TimeoutError as error:
            if not scope.expired():
                raise
            late = f"roles.{role}: {asked.url} gave no answer within {deadline:g} s, at last {last}"
            raise TrajectoryFailed(StopReason.ENVIRONMENT_TIMEOUT, late) from error

    async def _post(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[int, bytes | None]:
        if self._session is None:
            # The deadline of `answer` bounds a request, and the trajectories that are played bound their number.
            without = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(timeout=without, connector=aiohttp.TCPConnector(limit=0))
        async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as response:
            return response.status, await whole_body(response, ANSWER_BYTES)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


def generation_of(text: str, chat: Chat, most: int) -> Generation:
    """A text that the policy did not sample, as at most so many of the policy's tokens, without versions."""
    token_ids = chat.plain(text)
    kept = token_ids[:most]
    return Generation(
        kept,
        np.zeros(len(kept), np.float32),
        np.full(len(kept), NO_VERSION, np.int64),
        StopReason.STOP if len(kept) == len(token_ids) else StopReason.LENGTH,
        sampled_end=False,
    )


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
