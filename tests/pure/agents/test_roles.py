"""The roles of an agent's calls: what trains, and what is a title, a sub-agent, a replaced or a lost response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import pytest

from service.agents.call_roles import roles_of
from service.agents.conversation_tree import ConversationTree
from service.agents.messages_and_replies import JsonCalls
from service.agents.session import Session, kept_transcript
from service.handoff.group_bytes import TRANSCRIPT_BYTES
from service.handoff.steps.tables import steps_table
from service.handoff.steps.values import ROLES
from service.rollout.chat.chat import Chat
from service.rollout.plain_values import NotAllowed
from tests.pure.agents.endpoint import CHAT, GENERATE, Client, ScriptedServer, client_of, events_of, opened, until

MAIN, SUB, AUX, RETRY, UNDELIVERED = ROLES
TOOL = {"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {}}}}
SUMMARY = "What was done: the parser reads dates, and two tests of it fail since then."


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Program:
    """A client that keeps its own history, and can lose answers."""

    def __init__(self, client: Client, server: ScriptedServer, session: Session) -> None:
        self.client, self.server, self.session = client, server, session

    async def call(
        self, *messages: dict[str, Any], tools: bool = True, says: str = "17", **headers: str
    ) -> dict[str, Any]:
        self.server.say = lambda prompt: says
        body: dict[str, Any] = {"model": "m", "messages": list(messages)}
        if tools:
            body["tools"] = [TOOL]
        status, answer = await self.client.post(CHAT, body, **headers)
        assert status == 200, answer
        return dict(answer["choices"][0]["message"])

    def lose(self) -> None:
        """The newest answer did not arrive."""
        self.session.tree.calls[-1].delivered = False

    @property
    def roles(self) -> list[str]:
        return roles_of(self.session.tree.calls)


@asynccontextmanager
async def visited(chat: Chat, *named_roles: str) -> AsyncIterator[Program]:
    """A program at a server of its own, with a session there."""
    async with opened(chat, named_roles=named_roles) as server:
        session = server.session()
        async with client_of(server, session) as client:
            yield Program(client, server, session)


async def test_the_calls_of_a_coding_agent_have_the_roles_of_the_worked_example(bytes_chat: Chat) -> None:
    async with visited(bytes_chat) as agent:
        code, task = system("you code"), user("mend the parser")
        await agent.call(system("titles"), user("Name this task"), tools=False, says="Mend the date parser")
        first = await agent.call(code, task)
        await agent.call(code, task, first, user("go on"), says="lost on the way")
        again = await agent.call(code, task, first, user("go on"), says="read it")
        await agent.call(code, task, first, user("go on"), again, user("and then?"))
        search = system("you search")
        await agent.call(search, user("where are dates?"), says="in dates.py")
        summary = await agent.call(code, task, user("Sum up what was done"), tools=False, says=SUMMARY)
        begun = user(f"The story so far: {summary['content']} Now go on.")
        then = await agent.call(code, begun)
        await agent.call(code, begun, then, user("and now?"))
        agent.lose()
        await agent.call(system("you conclude"), user("the answer, please"), tools=False)
        assert again["content"] == "read it"
        assert agent.roles == [AUX, MAIN, RETRY, MAIN, MAIN, SUB, MAIN, MAIN, UNDELIVERED, MAIN]
        restored = ConversationTree(bytes_chat, JsonCalls())
        restored.restore(steps_table(agent.server.steps))
        assert roles_of(restored.calls) == [*agent.roles[:-2], MAIN, MAIN]


PIPELINES = (
    [("You plan.", "an essay"), ("You write.", "by the plan"), ("You revise.", "the draft")],
    [("question -> answer", "a"), ("question -> answer", "b")] * 2,
)


@pytest.mark.parametrize(("pipeline", "longest"), [*product(PIPELINES, range(3))])
async def test_every_step_of_a_pipeline_is_trained_whichever_response_is_the_longest(
    bytes_chat: Chat, pipeline: list[tuple[str, str]], longest: int
) -> None:
    async with visited(bytes_chat) as agent:
        for number, (instructions, question) in enumerate(pipeline):
            said = "words " * (20 if number == longest else 1)
            await agent.call(system(instructions), user(question), tools=False, says=said)
        assert agent.roles == [MAIN] * len(pipeline)


async def test_the_first_conversation_with_tools_is_the_agents_own_however_long_a_sub_agents_is(
    bytes_chat: Chat,
) -> None:
    async with visited(bytes_chat) as agent:
        lead = system("you lead"), user("mend it")
        first = await agent.call(*lead)
        search = [system("you search"), user("where?")]
        for _ in range(3):
            search += [await agent.call(*search), user("go on")]
        await agent.call(*lead, first, user("found in dates.py"))
        assert agent.roles == [MAIN, SUB, SUB, SUB, MAIN]


async def test_several_samples_of_one_request_are_trained_siblings(bytes_chat: Chat) -> None:
    """Asked for at once by `n`, one after the other, or at the same time under names of their own."""
    body = {"messages": [user("age?")], "n": 1}
    async with visited(bytes_chat) as agent, asyncio.timeout(30):
        texts = iter("abcdefgh")
        agent.server.say = lambda prompt: next(texts)
        _, answer = await agent.client.post(CHAT, {**body, "n": 3})
        assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [
            (0, "a"),
            (1, "b"),
            (2, "c"),
        ]
        assert answer["usage"]["completion_tokens"] == sum(len(step.response_ids) for step in agent.server.steps)
        for _ in range(2):
            await agent.client.post(CHAT, body)
        agent.server.sampling.clear()
        asked = [asyncio.create_task(agent.client.post(CHAT, body, X_Baton_Sample=name)) for name in ("x", "y", "y")]
        await until(lambda: len(agent.server.prompts) == 7)
        agent.server.sampling.set()
        replies = [answer["choices"][0]["message"]["content"] for _, answer in await asyncio.gather(*asked)]
        assert sorted(set(replies)) == ["f", "g"] and replies[1] == replies[2]
        assert agent.roles == [MAIN] * 7
        assert all(call.parent is None for call in agent.session.tree.calls)
        chunks = [chunk["choices"][0] for chunk in events_of(await agent.client.stream(CHAT, {**body, "n": 1}))]
        assert [chunk["index"] for chunk in chunks] == [0, 0]
        assert agent.server.endpoint.calls.answered["chat", "replayed"] == 0


async def test_independent_questions_and_edited_histories_are_the_agents_own(bytes_chat: Chat) -> None:
    async with visited(bytes_chat) as agent:
        for question in "abc":
            await agent.call(user(question), tools=False)
        assert agent.roles == [MAIN] * 3
        edited = {"role": "assistant", "content": "eighteen"}
        await agent.call(user("a"), edited, user("sure?"), tools=False)
        assert agent.roles == [MAIN] * 4
    async with visited(bytes_chat) as agent:  # beside a conversation, a single question is a title
        first = await agent.call(user("hi"), tools=False)
        await agent.call(user("A title for: hi"), tools=False, says="Greetings to a model")
        await agent.call(user("hi"), first, user("more"), tools=False)
        assert agent.roles == [MAIN, AUX, MAIN]


async def test_a_title_in_the_words_of_the_request_is_no_summary(bytes_chat: Chat) -> None:
    async with visited(bytes_chat) as agent:
        request = "Fix the login bug in auth.py, please"
        title = "Fix the login bug in auth.py"
        await agent.call(system("titles"), user(f"A title for: {request}"), tools=False, says=title)
        await agent.call(system("you code"), user(request))
        assert agent.roles == [AUX, MAIN]
        restored = ConversationTree(bytes_chat, JsonCalls())
        restored.restore(steps_table(agent.server.steps))
        assert roles_of(restored.calls) == agent.roles


async def test_a_client_names_the_role_of_a_conversation(bytes_chat: Chat) -> None:
    async with visited(bytes_chat) as agent:
        first = await agent.call(user("judge this"), X_Baton_Role="aux")
        await agent.call(user("judge this"), first, user("again"))
        await agent.call(user("solve this"), tools=False)
        assert agent.roles == [AUX, AUX, MAIN]
        for wrong in ("retry", "MAIN", "judge"):
            status, answer = await agent.client.post(CHAT, {"messages": [user("x")]}, X_Baton_Role=wrong)
            assert status == 400 and "main, sub, aux" in answer["error"]["message"]
        assert len(agent.server.steps) == 3


async def test_calls_and_roles_of_the_configuration_get_rewards_of_their_own(bytes_chat: Chat) -> None:
    async with visited(bytes_chat, "verifier") as agent:
        session, first = agent.session, await agent.call(user("solve this"))
        await agent.call(user("solve this"), first, user("again"))
        await agent.call(user("is it right ?"), tools=False, X_Baton_Role="verifier")
        assert agent.roles == [MAIN, MAIN, "verifier"]
        of_first = f"chatcmpl-{session.tree.calls[0].name}"
        session.finish(1.0, rewards={of_first: 0.25, "verifier": -1.0})
        outcome = session.ended.result()
        assert session.rewards_of_calls(outcome) == (0.25, 1.0, -1.0)
        assert session.rewards_of_calls(outcome._replace(reward=0.0, rewards={})) == ()
        with pytest.raises(NotAllowed, match="rewards\\['critic'\\] is for no call"):
            session.rewards_of_calls(outcome._replace(rewards={"critic": 1.0}))


async def test_a_conversation_that_no_client_received_is_not_the_agents_own(bytes_chat: Chat) -> None:
    async with visited(bytes_chat) as agent:
        await agent.call(system("one"), user("a"), tools=False)
        agent.lose()
        await agent.call(system("another"), user("a"), tools=False)
        assert agent.roles == [UNDELIVERED, MAIN]


async def test_a_lost_answer_that_comes_back_in_an_edited_history_was_delivered(bytes_chat: Chat) -> None:
    async with visited(bytes_chat) as agent:
        first = await agent.call(user("a"))
        second = await agent.call(user("a"), first, user("b"), says="the second answer")
        agent.lose()
        assert agent.roles == [MAIN, UNDELIVERED]
        await agent.call(user("a"), first | {"content": "changed"}, user("b"), second, user("c"))
        assert agent.roles == [MAIN, MAIN, MAIN]


async def test_calls_with_tokens_of_the_client_are_its_own_conversation(bytes_chat: Chat) -> None:
    async with visited(bytes_chat) as agent:
        for prompt in ([5], [6]):
            await agent.client.post(GENERATE, {"token_ids": prompt})
        assert agent.roles == [MAIN, MAIN]


@pytest.mark.parametrize("text", ["short", "ä" * TRANSCRIPT_BYTES, "\ud800 half a character"])
async def test_a_transcript_is_kept_within_its_bound_and_cut_in_the_middle(bytes_chat: Chat, text: str) -> None:
    async with visited(bytes_chat) as agent:
        agent.session.finish(1.0, transcript=text)
        kept = kept_transcript(agent.session.transcript)
        assert min(len(text.encode(errors="replace")), TRANSCRIPT_BYTES - 8) <= len(kept) <= TRANSCRIPT_BYTES
        assert kept.decode()[:1] == text[:1].replace("\ud800", "?")
        assert ("bytes and more left out" in kept.decode()) == (len(text) > TRANSCRIPT_BYTES // 2)
