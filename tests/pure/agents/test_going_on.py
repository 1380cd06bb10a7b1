"""A session goes on in another process, from the steps that the buffer has of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.agents.session import SPENT, Session
from service.handoff.steps.tables import steps_table
from service.types import Step
from tests.pure.agents.endpoint import ScriptedServer, client_of, whole
from tests.pure.agents.talks import ALL, ChatTalk, called

VOLATILE = ("created", "created_at")


def again(server: ScriptedServer, steps: list[Step]) -> Session:
    """The session in a new process of its generator."""
    session = server.session()
    session.restore(steps_table(steps[::-1]))  # the buffer returns them in any order
    return session


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in VOLATILE}


@ALL
async def test_a_session_goes_on_as_if_nothing_had_happened(server: ScriptedServer, make: type[ChatTalk]) -> None:
    server.say = lambda prompt: called() if prompt.count("age of") == 1 else "17"
    talk = make("age of fox?")
    first = server.session()
    async with client_of(server, first) as client:
        _, reply = await client.post(talk.path, talk.body())
        talk.answered(reply, "17")
        body = talk.body()
        _, lost = await client.post(talk.path, body)
    n_steps, n_sampled = len(server.steps), len(server.replies)
    restored = again(server, server.steps)
    assert restored.n_steps == n_steps
    async with client_of(server, restored) as client:
        assert lasting((await client.post(talk.path, body))[1]) == lasting(lost)
        assert (len(server.steps), len(server.replies)) == (n_steps, n_sampled)
        talk.answered(lost, "and of the cat?")
        assert (await client.post(talk.path, talk.body()))[0] == 200
    third = server.steps[-1]
    assert third.index == n_steps and third.extends is not None and third.extends.step == n_steps - 1
    assert whole(server.steps)[-1] == server.prompts[-1]


async def test_branches_stay_branches_of_the_same_call(server: ScriptedServer) -> None:
    server.say = lambda prompt: "same"
    talk = ChatTalk("hi")
    first = server.session()
    async with client_of(server, first) as client:
        for temperature in (0.1, 0.2):  # two calls of equal content, of which ids tell one from the other
            _, reply = await client.post(talk.path, {**talk.body(), "temperature": temperature})
    talk.answered(reply, "go on")
    restored = again(server, server.steps)
    async with client_of(server, restored) as client:
        await client.post(talk.path, talk.body())
        await client.post(talk.path, {**talk.body(), "temperature": 0.3})
    assert [step.extends.step for step in server.steps[2:] if step.extends] == [1, 1]
    assert restored.tree.calls[0].delivered is False and restored.tree.calls[1].delivered is True


async def test_what_a_session_may_have_counts_from_its_first_step(server: ScriptedServer) -> None:
    server.allowed = replace(server.allowed, max_turns=2)
    talk = ChatTalk("hi")
    first = server.session()
    async with client_of(server, first) as client:
        await client.post(talk.path, talk.body())
    server.max_tokens = len(server.prompts[0]) + len(server.replies[0]) + 10
    spent = again(server, server.steps)
    async with client_of(server, spent) as client:
        talk.say("and ?")
        assert talk.text((await client.post(talk.path, talk.body()))[1]) == SPENT
    server.max_tokens = 100_000
    restored = again(server, server.steps)
    async with client_of(server, restored) as client:
        for words, expected in (("a", 2), ("b", 2)):
            talk.say(words)
            assert (await client.post(talk.path, talk.body()))[0] == 200
            assert len(server.steps) == expected


@pytest.mark.parametrize("fault", ["missing", "no note", "odd note", "a later parent", "another parent"])
async def test_steps_that_are_no_session_are_refused(server: ScriptedServer, fault: str) -> None:
    talk, first = ChatTalk("a"), server.session()
    async with client_of(server, first) as client:
        await client.post(talk.path, talk.body())
        talk.say("b")
        await client.post(talk.path, talk.body())
    steps = server.steps
    later, other = (steps[1].note.replace(",-1,", f",{parent},") for parent in (1, 0))
    notes = {"no note": "", "odd note": "[1]", "a later parent": later, "another parent": other}
    changed = steps[1:] if fault == "missing" else [steps[0], replace(steps[1], note=notes[fault])]
    with pytest.raises(ValueError, match=r"step [01]"):
        again(server, changed)
