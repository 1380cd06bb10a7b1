"""Agents over HTTP: exact tokens in every dialect, steps before answers, and what clients do that nobody expects."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from service.agents import policy_calls
from service.agents.dialects.dialect import Refused
from service.agents.session import MAX_LOGGED, SPENT, Session
from service.handoff.steps.values import StopReason
from service.rollout.environment import TrajectoryFailed
from tests.pure.agents.endpoint import CHAT, GENERATE, MESSAGES, Client, ScriptedServer, client_of, until, whole
from tests.pure.agents.talks import ALL, ChatTalk, MessagesTalk, exchange, says
from tests.pure.rollout.conftest import generated


async def test_token_ids_are_continued_by_token_ids_and_come_back_with_what_the_engine_said(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    says(server, "16", "17", "18")
    prompt = server.chat._special_tokens.encode("<|im_start|>user age ?").tolist()
    body = {"model": "m", "token_ids": prompt, "sampling_params": {"max_tokens": 9, "temperature": 0.1}}
    status, reply = await client.post(GENERATE, body)
    (choice,) = reply["choices"]
    assert status == 200 and choice["token_ids"] == server.steps[0].response_ids.tolist() and server.most == [9]
    assert [one["token_id"] for one in choice["logprobs"]["content"]] == choice["token_ids"]
    assert choice["weight_versions"][0]["end"] == len(choice["token_ids"])
    longer = [*prompt, *choice["token_ids"], *server.chat.plain("and ?").tolist()]
    await client.post(GENERATE, body | {"token_ids": longer})
    await client.post(GENERATE, body | {"token_ids": [*prompt, 7]})
    assert [call.how for call in session.tree.calls] == ["root", "appended", "root"]
    assert whole(server.steps) == server.prompts == [prompt, longer, [*prompt, 7]]


async def test_what_makes_no_call_is_counted_without_one(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    talk = MessagesTalk("age ?")
    body = talk.body()
    del body["max_tokens"]
    _, counted = await client.post(f"{MESSAGES}/count_tokens", body)
    await exchange(client, talk, "")
    assert counted["input_tokens"] == len(server.prompts[0]) and len(session.tree.calls) == 1
    async with aiohttp.ClientSession(headers=client.headers) as http, http.get(f"{session.base_url}/models") as answer:
        (model,) = (await answer.json())["data"]
    assert model["max_model_len"] == 4200


@ALL
@pytest.mark.parametrize("streamed", [False, True])
async def test_no_byte_of_an_answer_leaves_before_the_buffer_has_the_step(
    server: ScriptedServer, session: Session, make: type[ChatTalk], streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calls, "KEEP_ALIVE_SECONDS", 0.02)
    server.accepting.clear()
    talk = make("age ?")
    body = talk.body() | ({"stream": True} if streamed else {})
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {session.key}"}) as http:
        request = asyncio.create_task(http.post(server.address + talk.path, json=body))
        await until(lambda: server.steps)
        await asyncio.sleep(0.1)
        if streamed:
            answer = await request
            so_far = await answer.content.readany()
            assert set(so_far.split(b"\n\n")) == {policy_calls.COMMENT.strip(), b""}
        else:
            assert not request.done()
        server.accepting.set()
        answer = await request
        said = (await answer.read()).decode()
    assert "17" in said and answer.status == 200


@ALL
async def test_a_step_that_the_buffer_refuses_is_not_answered_and_ends_the_session(
    server: ScriptedServer, session: Session, client: Client, make: type[ChatTalk]
) -> None:
    server.accepts = False
    talk = make("age ?")
    status, reply = await client.post(talk.path, talk.body())
    assert status == 502 and "abort" in talk.error(reply) and "17" not in talk.error(reply)
    assert (await client.post(talk.path, talk.body()))[0] == 409
    with pytest.raises(TrajectoryFailed, match="the buffer accepts no more steps of it"):
        session.ended.result()


@ALL
async def test_a_failure_after_the_headers_is_an_event_of_the_dialect(
    server: ScriptedServer, session: Session, client: Client, make: type[ChatTalk], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_calls, "KEEP_ALIVE_SECONDS", 0.02)
    server.sampling.clear()
    server.say = lambda prompt: TrajectoryFailed(StopReason.ENGINE_TIMEOUT, "no turn")
    talk = make("age ?")
    stream = asyncio.create_task(client.stream(talk.path, talk.body()))
    await until(lambda: server.prompts)
    await asyncio.sleep(0.1)
    server.sampling.set()
    said = (await stream).decode()
    assert said.startswith(policy_calls.COMMENT.decode()) and "error" in said and "engine_timeout" in said
    assert server.steps == [] and session.n_steps == 0


@ALL
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_lost_the_reply_gets_the_same_call_again(
    server: ScriptedServer, session: Session, client: Client, make: type[ChatTalk], streamed: bool
) -> None:
    says(server, "16", "17")
    server.accepting.clear()
    talk = make("age ?")
    body, left = talk.body() | ({"stream": True} if streamed else {}), asyncio.Event()
    leaving = asyncio.create_task(client.leave(talk.path, body, left))
    await until(lambda: server.steps)
    left.set()
    await leaving
    await asyncio.sleep(0.05)
    server.accepting.set()
    await until(lambda: server.endpoint.requests.undelivered)
    (call,) = session.tree.calls
    assert not call.delivered
    if streamed:
        assert b"16" in await client.stream(talk.path, talk.body())
    else:
        assert talk.text((await client.post(talk.path, body))[1]) == "16"
    assert session.tree.calls == [call] and call.delivered and len(server.steps) == 1


async def test_equal_bodies_join_in_flight_sample_anew_after_delivery_and_replay_where_the_client_says_retry(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    says(server, "16", "17")
    server.sampling.clear()
    talk = ChatTalk("age ?")
    both = [asyncio.create_task(client.post(CHAT, talk.body())) for _ in range(2)]
    await until(lambda: server.prompts)
    await asyncio.sleep(0.05)
    server.sampling.set()
    first, second = [talk.text((await one)[1]) for one in both]
    assert (first, second, session.n_steps) == ("16", "16", 1)
    assert talk.text((await client.post(CHAT, talk.body(), x_stainless_retry_count="1"))[1]) == "16"
    assert talk.text((await client.post(CHAT, talk.body(), x_stainless_retry_count="0"))[1]) == "17"
    assert session.n_steps == 2
    assert server.endpoint.calls.answered["chat", "replayed"] == 1


@ALL
async def test_a_spent_session_gets_an_ordinary_answer_that_is_no_step(
    server: ScriptedServer, make: type[ChatTalk]
) -> None:
    server.allowed = replace(server.allowed, max_turns=2)
    session, talk = server.session(), make("age ?")
    async with client_of(server, session) as client:
        for _ in range(2):
            assert talk.text(await exchange(client, talk, "again")) == "17"
        for _ in range(2):
            assert talk.text(await exchange(client, talk, "again")) == SPENT
        assert SPENT.encode() in await client.stream(talk.path, talk.body())
    assert (len(server.steps), session.n_steps, session.stop_reason) == (2, 2, StopReason.MAX_TURNS)


async def test_calls_at_once_count_once_each_and_exceed_neither_bound(server: ScriptedServer) -> None:
    server.accepting.clear()
    server.allowed = replace(server.allowed, max_turns=3)
    talk = ChatTalk("age ?")
    prompt = len(server.chat.prompt(talk.messages, talk.body()["tools"]))
    server.max_tokens = 2 * (prompt + 201) + prompt
    server.say = lambda prompt: generated([5] * server.most[-1], "length", sampled_end=False)
    session = server.session()
    async with client_of(server, session) as client:
        asked = [asyncio.create_task(client.post(CHAT, talk.body() | {"user": name})) for name in "abcd"]
        await until(lambda: len(server.replies) >= 2)
        server.accepting.set()
        assert [talk.text(reply) for _, reply in await asyncio.gather(*asked)].count(SPENT) == 2
        server.max_tokens = 10**6
        session = server.session(1)
        client.headers = {"x-api-key": session.key}
        server.accepting.clear()
        asked = [asyncio.create_task(client.post(CHAT, talk.body() | {"user": name})) for name in "abcd"]
        await until(lambda: len(server.replies) >= 5)
        server.accepting.set()
        assert [talk.text(reply) for _, reply in await asyncio.gather(*asked)].count(SPENT) == 1
    first = server.steps[:2]
    assert [*map(len, whole(first))] == [prompt] * 2 and [len(step.response_ids) for step in first] == [201] * 2


async def test_tokens_of_a_session_are_bounded_and_responses_shortened_to_what_is_left(server: ScriptedServer) -> None:
    talk = ChatTalk("age ?")
    prompt = len(server.chat.prompt(talk.messages, talk.body()["tools"]))
    server.max_tokens = prompt + 12
    server.say = lambda prompt: generated([5] * server.most[-1], "length", sampled_end=False)
    session = server.session()
    async with client_of(server, session) as client:
        _, reply = await client.post(CHAT, talk.body() | {"max_tokens": 4})
        assert (server.most, reply["choices"][0]["finish_reason"]) == ([4], "length")
        other = ChatTalk("age ?")
        assert other.text((await client.post(CHAT, other.body() | {"user": "x"}))[1]) == SPENT
    kept = sum(len(step.prompt_ids) + len(step.response_ids) for step in server.steps)
    assert kept == prompt + 5 <= server.max_tokens and session.stop_reason == StopReason.LENGTH
    server.max_tokens = 2 * prompt + 3 + 12
    session = server.session(1)
    async with client_of(server, session) as client:
        server.say = lambda prompt: "17"  # three tokens, fewer than the call might have sampled
        await client.post(CHAT, talk.body() | {"user": "a"})
        server.say = lambda prompt: generated([5] * server.most[-1], "length", sampled_end=False)
        await client.post(CHAT, talk.body() | {"user": "b", "max_tokens": 500})
    assert server.most[-2:] == [200, 11]  # one is left for the end that a cut response gets


@ALL
async def test_a_prompt_beyond_the_context_is_refused_by_the_name_that_clients_test(
    server: ScriptedServer, make: type[ChatTalk]
) -> None:
    talk = make("age ? " * 100)
    fits = server.session()
    async with client_of(server, fits) as client:
        await client.post(talk.path, talk.body())
    for room in (0, -1):
        server.allowed = replace(server.allowed, max_input_length=len(server.prompts[0]) + room)
        session = server.session(1 - room)
        async with client_of(server, session) as client:
            status, reply = await client.post(talk.path, talk.body())
        assert (status == 200) == (room == 0)
    assert status == 400 and "context length" in talk.error(reply) and "prompt is too long" in talk.error(reply)
    assert make is MessagesTalk or reply["error"]["code"] == "context_length_exceeded"
    assert (session.n_steps, session.stop_reason) == (0, StopReason.LENGTH)


async def test_a_call_beside_the_longest_chain_does_not_cut_the_trajectory(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    def say(prompt: str) -> Any:
        return generated([5], "length", sampled_end=False) if server.most[-1] == 1 else "17"

    server.say = say
    talk, probe = ChatTalk("age ?"), ChatTalk("hello ?")
    await exchange(client, talk, "sure ?")
    await exchange(client, talk, "why ?")
    assert (await client.post(CHAT, probe.body() | {"max_tokens": 1}))[0] == 200
    assert session.stop_reason == StopReason.STOP
    assert (await client.post(CHAT, talk.body() | {"max_tokens": 1}))[0] == 200
    assert session.stop_reason == StopReason.TRUNCATED


async def test_a_call_is_answered_while_a_large_prompt_is_rendered(server: ScriptedServer) -> None:
    server.allowed = replace(server.allowed, max_input_length=600_000)
    server.max_tokens = 10**6
    large, small = ChatTalk("how old is the fox ? " * 20_000), ChatTalk("age ?")
    session, other = server.session(), server.session(1)
    async with client_of(server, session) as client, client_of(server, other) as quick:
        asked = asyncio.create_task(client.post(CHAT, large.body()))
        await until(lambda: session.opening.locked())
        await exchange(quick, small, "why ?")
        await exchange(quick, small, "")
        assert (await asked)[0] == 200
    assert [len(prompt) > 100_000 for prompt in server.prompts] == [False, False, True]


async def test_a_session_that_ends_while_its_prompt_is_rendered_makes_no_call(server: ScriptedServer) -> None:
    server.allowed = replace(server.allowed, max_input_length=600_000)
    server.max_tokens = 10**6
    talk = ChatTalk("how old is the fox ? " * 5000)
    session = server.session()
    async with client_of(server, session) as client:
        asked = asyncio.create_task(client.post(CHAT, talk.body()))
        await until(lambda: session.opening.locked())
        session.finish(1.0)
        assert (await asked)[0] == 409
    assert server.prompts == [] and session.n_steps == 0


async def test_a_client_that_is_refused_in_ever_new_ways_fills_no_memory(session: Session, client: Client) -> None:
    for number in range(MAX_LOGGED + 2):
        assert (await client.post(CHAT, {"messages": number}, user_agent=f"agent {number}"))[0] == 400
    assert len(session.refusals) == MAX_LOGGED


async def test_a_reward_over_http_counts_where_the_end_brings_none_and_nonsense_is_refused(
    session: Session, client: Client
) -> None:
    url = "/rl/sessions/any"
    for body in (
        {"reward": "1"},
        {"reward": float("nan")},
        {"reward": True},
        {"reward": 10**400},
        {"reward": 1, "status": "fine"},
        {"score": 1},
    ):
        for verb in ("reward", "finish"):
            assert (await client.post(f"{url}/{verb}", body))[0] == 400
    for field in ({"rewards": {}}, {"info": {"looks": 2.0}}, {"status": "failed"}):  # they would be lost
        assert (await client.post(f"{url}/reward", {"reward": 1.0, **field}))[0] == 400 and session.posted is None
    assert (await client.post(f"{url}/reward", {"reward": 0.25}))[0] == 200 and session.state == "open"
    assert (await client.post(f"{url}/finish", {}))[0] == 200
    assert (session.state, session.ended.result().reward) == ("finished", 0.25)
    assert (await client.post(f"{url}/finish", {"reward": 1.0}))[0] == 409


async def test_an_agent_is_silent_from_its_last_answer_or_request_on(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    server.sampling.clear()
    asked = asyncio.create_task(client.post(CHAT, ChatTalk("age ?").body()))
    await until(lambda: server.prompts)
    session.heard -= 1000.0  # as long as the call was sampled
    assert session.silence == 0.0
    server.sampling.set()
    assert (await asked)[0] == 200 and session.silence < 500.0
    session.heard -= 1000.0
    assert (await client.post("/rl/sessions/any/reward", {"reward": 1.0}))[0] == 200 and session.silence < 500.0
    session.heard -= 1000.0
    look = f"{server.address}/rl/sessions/any"
    async with aiohttp.ClientSession(headers=client.headers) as http, http.get(look) as got:
        assert got.status == 200 and session.silence < 500.0


async def test_a_session_that_ends_gives_up_what_is_being_sampled(
    server: ScriptedServer, session: Session, client: Client
) -> None:
    server.sampling.clear()
    talk = ChatTalk("age ?")
    asked = asyncio.create_task(client.post(CHAT, talk.body()))
    await until(lambda: server.prompts)
    session.finish(0.5, "ok", {"looks": 2.0})
    assert (await asked)[0] == 409 and session.n_steps == 0
    session.finish(0.5, "ok", {"looks": 2.0})
    with pytest.raises(Refused):
        session.finish(0.75, "ok", {"looks": 2.0})
    session.close(RuntimeError("the engine died later"))
    assert json.loads(json.dumps(session.ended.result())) == [0.5, "ok", {"looks": 2.0}, {}, "", None]
    cancelled = server.session(1)
    client.headers = {"Authorization": f"Bearer {cancelled.key}"}
    asked = asyncio.create_task(client.post(CHAT, talk.body()))
    await until(lambda: len(server.prompts) == 2)
    cancelled.close()
    assert (await asked)[0] == 409 and cancelled.n_steps == 0
    await until(lambda: cancelled.waits_for == "idle")  # though the engine has not answered
