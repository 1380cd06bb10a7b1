"""One session to try out an agent: prints each call when it is made, and at the end what would be trained.

call 0: main, a new conversation, 17 tokens -> 23 sampled, calls search({"query": "fox"})
call 1: main, continues 0, 12 tokens -> 5 sampled, "it is 17"
28 of 28 sampled tokens would be trained
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import numpy as np

from service.agents.agents import Agents
from service.agents.call_roles import roles_of
from service.agents.conversation_tree import AgentCall
from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import generation_of
from service.rollout.engine import Generation, Sampling
from service.rollout.environment import Task
from service.types import Int32s, TrajectoryEnd, TrajectoryId

CHECK_SECONDS = 2.0
"""Seconds between two checks of the engine."""
SHOWN = 60
"""Maximum characters of a text or of arguments that are printed."""
HOW = {"root": "a new conversation", "rerendered": "a new conversation (it has an answer that the policy did not give)"}


class ScriptedPolicy:
    """An engine whose answers are the texts of a script, in order; the last text is repeated."""

    def __init__(self, chat: Chat, texts: Sequence[str]) -> None:
        self._chat = chat
        self._texts = chain(texts, repeat(texts[-1]))

    async def check(self, deadline: float) -> None:
        """Do nothing: a script never fails."""

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """The next scripted text; the prompt is ignored."""
        said = generation_of(next(self._texts), self._chat, sampling.max_tokens)
        return replace(said, versions=np.zeros_like(said.versions))


class Trial:
    """A session to try out an agent; no buffer receives its steps."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self.session = agents.session(TrajectoryId(0, 0), Task("try", (), ""), self)

    async def run(self, check: Callable[[], Awaitable[None]]) -> None:
        """Serve until the session ends, or until `check` finds that the engine has died."""
        await self._agents.listen()
        url, key = f"{self._agents.address}/s/{self.session.name}", self.session.key
        print(f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}")
        print(f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}", flush=True)
        while not (await asyncio.wait({self.session.ended}, timeout=CHECK_SECONDS))[0]:
            await check()
        self.session.recorded.set_result(True)  # so that `finish` is answered
        calls, trained = self.session.tree.calls, self._agents.trained
        roles = roles_of(calls)
        print("\nat the end:", *map(told, calls, roles), sep="\n")
        masks = [call.response.loss_mask for call, role in zip(calls, roles, strict=True) if role in trained]
        sampled = sum(call.n_sampled for call in calls)
        print(f"{sum(map(np.count_nonzero, masks))} of {sampled} sampled tokens would be trained", flush=True)
        if refused := self.session.refused_requests:
            print(refused, flush=True)
        if not self.session.ended.cancelled():
            self.session.ended.result()

    def append(self, *step: Any, **columns: Any) -> None:
        """Print the newest call, with its role if the client gets the reply and makes no other call."""
        *before, call = self.session.tree.calls
        print(told(call, roles_of([*before, replace(call, delivered=True)])[-1]), flush=True)

    def end(self, end: TrajectoryEnd) -> None:
        """Do nothing: no buffer receives the trajectory."""

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        """Whether the trajectory's steps were accepted: always True, because there is no buffer."""
        return True


def told(call: AgentCall, role: str) -> str:
    """A call as a line of text, as in the module's example."""
    begins = HOW[call.how] if call.parent is None else f"continues {call.parent.index}"
    calls = [f"{name}({json.dumps(dict(arguments)):.{SHOWN}})" for name, arguments in call.reply.calls]
    said = f"calls {', '.join(calls)}" if calls else json.dumps(call.reply.content[:SHOWN])
    return f"call {call.index}: {role}, {begins}, {len(call.carried_ids)} tokens -> {call.n_sampled} sampled, {said}"
