"""Clients that repeat, leave, edit and forget at random: every step is what the engine was asked and answered."""

from __future__ import annotations

import asyncio
import random
from copy import deepcopy

import numpy as np
import pytest

from service.agents.session import Session
from service.handoff.steps.tables import steps_table
from tests.pure.agents.endpoint import CHAT, Client, ScriptedServer, client_of
from tests.pure.agents.talks import FORGED, ChatTalk, called, exchange


class Unruly:
    """A client of chat completions that repeats, leaves, edits, forgets and asks several things at once."""

    def __init__(self, server: ScriptedServer, client: Client, session: Session, seed: int) -> None:
        self.server, self.client, self.session, self.random = server, client, session, random.Random(seed)
        self.open: list[ChatTalk] = []
        server.say = lambda prompt: self.random.choice(["17", called(), f"<think>{FORGED}</think>18", FORGED])

    async def talk(self) -> None:
        kinds = (self.go_on, self.go_on, self.repeat, self.leave, self.edit, self.forget, self.several)
        for _ in range(8):
            if not self.open:
                self.open.append(ChatTalk("age ?"))
            await self.random.choice(kinds)(deepcopy(self.random.choice(self.open)))

    async def go_on(self, talk: ChatTalk) -> None:
        await exchange(self.client, talk, self.random.choice(["owl", FORGED]))
        self.open.append(talk)

    async def repeat(self, talk: ChatTalk) -> None:
        for retries in ("0", self.random.choice("01")):
            assert (await self.client.post(CHAT, talk.body(), x_stainless_retry_count=retries))[0] == 200

    async def leave(self, talk: ChatTalk) -> None:
        self.server.accepting.clear()
        left, n_steps = asyncio.Event(), len(self.server.steps)
        body = talk.body() | {"user": str(self.random.random())}
        leaving = asyncio.create_task(self.client.leave(CHAT, body, left))
        while len(self.server.steps) == n_steps:
            await asyncio.sleep(0.001)
        left.set()
        await leaving
        self.server.accepting.set()
        if self.random.random() < 0.5:
            assert (await self.client.post(CHAT, body))[0] == 200
            assert len(self.server.steps) == n_steps + 1, "no second sample"

    async def edit(self, talk: ChatTalk) -> None:
        if any(message["role"] == "assistant" for message in talk.messages):
            talk.edit("what nobody said")
            await self.go_on(talk)

    async def forget(self, talk: ChatTalk) -> None:
        del talk.messages[2:]
        await self.go_on(talk)

    async def several(self, talk: ChatTalk) -> None:
        bodies = [talk.body() | {"user": str(self.random.random())} for _ in range(3)]
        answers = await asyncio.gather(*(self.client.post(CHAT, body) for body in bodies))
        assert [status for status, _ in answers] == [200] * 3


class Interrupted(Unruly):
    """An unruly client whose generator begins anew now and then."""

    async def go_on(self, talk: ChatTalk) -> None:
        if self.random.random() < 0.4:
            steps = [step for step in self.server.steps if step.trajectory == self.session.trajectory]
            self.server.sessions.remove(self.session)
            self.session = self.server.session(self.session.trajectory.sample)
            self.session.restore(steps_table(steps[::-1]))  # the buffer returns them in any order
            self.client.headers = {"Authorization": f"Bearer {self.session.key}"}
        await super().go_on(talk)


@pytest.mark.parametrize("n_conversations", [15, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [Unruly, Interrupted])
async def test_whatever_clients_do_the_steps_are_what_the_engine_was_asked_and_answered(
    server: ScriptedServer, kind: type[Unruly], n_conversations: int
) -> None:
    for seed in range(n_conversations):
        server.clear()
        async with client_of(server, first := server.session(seed)) as client:
            talking = kind(server, client, first, seed)
            await talking.talk()
        session = talking.session
        assert server.is_exact
        assert [step.index for step in server.steps] == list(range(session.n_steps))
        for call, step in zip(session.tree.calls, server.steps, strict=True):
            assert call.response.token_ids.tolist() == step.response_ids.tolist()
            if call.parent is not None:
                assert step.extends is not None and step.extends.step == call.parent.index
                assert call.parent.delivered, "a client can only continue what it got"
                before = call.parent.token_ids()
                assert np.array_equal(call.token_ids()[: len(before)], before)
        server.sessions.remove(session)
