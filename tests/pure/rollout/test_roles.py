"""Several roles in one trajectory: conversations, rewards, frozen models, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from service.backoff import Backoff
from service.config.rollout import RoleConfig, ScorerConfig
from service.errors import UserError
from service.handoff.steps.tables import step_objects
from service.handoff.steps.values import MAX_REWARD, roles_from
from service.rollout.agent_loop import run_trajectory
from service.rollout.chat import frozen
from service.rollout.chat.chat import Chat
from service.rollout.chat.frozen import FrozenModels
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import Message, StepResult
from service.rollout.step_sinks import StepColumns
from service.scorers.scorer import TeacherAddress
from service.types import NO_VERSION, Step, TrajectoryEnd, TrajectoryId
from tests.pure.rollout.conftest import QUESTION, ScriptedEngine, ScriptedEnvironment, limits, served, whole_prompts

CHECK = [Message(role="user", content="is the answer 17 ?")]
NAMED = ["verifier"]


def turn(words: str, reward: float = 0.0, role: str = "main", **more: Any) -> StepResult:
    return StepResult([Message(role="user", content=words)], reward, False, role=role, **more)


async def played(
    chat: Chat,
    results: Sequence[StepResult],
    models: Mapping[str, RoleConfig] | None = None,
    says: str = "answer 17",
    within: float = 60.0,
) -> tuple[list[Step], TrajectoryEnd, str, ScriptedEngine]:
    """A trajectory with the role `verifier`: its steps, its end, why it is lost, and the engine that was asked."""
    roles = {"verifier": RoleConfig()} if models is None else models
    allowed, columns, engine = (
        limits(chat, roles={"main": None, **roles}, request_deadline=within),
        StepColumns(),
        ScriptedEngine(chat, lambda words: says),
    )
    environment, asked = ScriptedEnvironment(results), FrozenModels(roles)
    guard = EnvGuard("scripted", lambda: environment, allowed)
    found = await run_trajectory(TrajectoryId(0, 0), QUESTION, guard, engine, chat, allowed, 0, columns, asked)
    await asked.close()
    return step_objects(columns.steps()), found.end, found.failure, engine


async def test_each_role_has_a_conversation_of_its_own_and_gets_rewards_also_later(chat: Chat) -> None:
    results = [
        turn("is it 17 ?", 0.5, "verifier"),
        turn("no", 1.0, rewards={"main": -0.25}),
        turn("is it owl ?", 0.0, "verifier"),
        StepResult([], 2.0, True, rewards={"main": 0.125, "verifier": 0.5}),
    ]
    steps, end, failure, engine = await played(chat, results)
    assert failure == "" and engine.prompts == whole_prompts(steps)
    assert [step.extends and step.extends.step for step in steps] == [None, 0, 0, 1]
    assert engine.prompts[1] == chat.prompt([Message(role="user", content="is it 17 ?")]).tolist()
    main = [*QUESTION.prompt, Message(role="assistant", content="answer 17"), Message(role="user", content="no")]
    assert engine.prompts[2] == chat.prompt(main).tolist()
    assert roles_from(end.roles, 4, NAMED) == ["main", "verifier", "main", "verifier"]
    assert [step.reward for step in steps] == [0.5, 1.0, 0.0, 2.0]
    assert end.rewards == (-0.25, 0.0, 0.125, 0.5) and end.reward == 0.125
    _, end, _, _ = await played(chat, [turn("?", 0.5, "verifier"), StepResult([], 7.0, True, rewards={"main": 1.0})])
    assert end.reward == 1.5 and end.rewards == (1.0, 0.0), "that of the newest turn of main"


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (turn("?", role="judge"), "role: 'judge' is no role of the run (main, verifier)"),
        (turn("?", role=3), "role: 3 is no role of the run"),  # type: ignore[arg-type]
        (turn("?", rewards={"judge": 1.0}), "rewards: 'judge' is no role of the run"),
        (turn("?", rewards={"main": float("nan")}), "rewards['main'] is nan"),
        (turn("?", rewards={"verifier": 1.0}), "rewards['verifier']: the role has had no turn"),
        (turn("?", MAX_REWARD, rewards={"main": 1.0}), "or its sum is not a number from"),
    ],
)
async def test_roles_that_are_not_there_lose_the_trajectory_in_one_line(
    chat: Chat, result: StepResult, why: str
) -> None:
    _, _, failure, _ = await played(chat, [result])
    assert why in failure and "\n" not in failure


def said(text: object) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


async def test_a_frozen_role_is_played_by_its_model_and_nothing_of_it_is_trained(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "BACKOFF", Backoff(0.01))
    (tmp_path / "key").write_text("sesame\n")
    heard, left = list[Any](), [(503, {}), (200, said("owl")), (200, said("none"))]

    async def answer(request: web.Request) -> web.Response:
        heard.append((request.headers.get("Authorization"), await request.json()))
        status, body = left.pop(0)
        return web.json_response(body, status=status)

    (app := web.Application()).add_routes([web.post("/v1/chat/completions", answer)])
    results = [turn("is it 17 ?", role="verifier"), turn("more ?", role="verifier"), StepResult([], 1.0, True)]
    async with served(app) as url:
        role = RoleConfig(mode="frozen", url=f"{url}/v1", model="other", key_file=tmp_path / "key")
        steps, end, failure, engine = await played(chat, results, {"verifier": role})
    assert failure == "" and len(engine.prompts) == 1 and end.n_steps == 3
    assert [chat.text(step.response_ids) for step in steps[1:]] == ["owl", "none"]
    for step in steps[1:]:
        assert not step.loss_mask.any() and (step.versions == NO_VERSION).all()
    assert steps[0].loss_mask.all()
    keys, asked = zip(*heard, strict=True)
    assert set(keys) == {"Bearer sesame"} and [body["model"] for body in asked] == ["other"] * 3
    assert asked[0] == asked[1] and asked[2]["messages"] == [
        {"role": "user", "content": "is it 17 ?"},
        {"role": "assistant", "content": "owl"},
        {"role": "user", "content": "more ?"},
    ]


async def played_with_a_server_that(chat: Chat, *parts: bytes, pause: float = 0.0) -> tuple[list[Step], str]:
    """A trajectory whose frozen role is asked at a server that sends these bytes, in so many parts, and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(task := asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"}]")
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            writer.close()
            await writer.wait_closed()
        answering.discard(task)

    answering = set[asyncio.Task[None] | None]()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        role = RoleConfig(mode="frozen", url=url, model="other")
        results = [turn("?", role="verifier"), StepResult([], 1.0, True)]
        steps, _, failure, _ = await played(chat, results, {"verifier": role}, within=0.5)
        while answering:
            await asyncio.sleep(0.01)
    return steps, failure


def http(answer: object, length: int = 0, status: int = 200) -> bytes:
    body = json.dumps(answer).encode()
    return b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n" % (status, length or len(body)) + body


async def test_an_answer_that_comes_in_many_parts_is_read_to_its_end(chat: Chat) -> None:
    whole = http(said("owl " + "17 " * 8))
    steps, failure = await played_with_a_server_that(chat, whole[:60], whole[60:75], whole[75:], pause=0.02)
    assert failure == "" and chat.text(steps[1].response_ids).startswith("owl 17 17")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        http(said("owl"))[:-9],
        http(said("owl"), length=1 << 40),
        http(said("owl"), status=400),
        http({"choices": []}),
        http(said(None)),
        http(said([{"type": "text", "text": "owl"}])),
        http(said("owl\ud800")),
        http(said("x" * (frozen.ANSWER_BYTES + 1))),
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope",
        b"HTTP/1.1 307 \r\nLocation: http://[\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"[" * 100_000,
    ],
)
async def test_what_a_frozen_model_sends_costs_that_trajectory_only(chat: Chat, sent: bytes) -> None:
    steps, failure = await played_with_a_server_that(chat, sent)
    assert len(steps) == 1 and "roles.verifier" in failure and "\n" not in failure and len(failure) < 500


@pytest.mark.parametrize(
    ("key", "why"),
    [(None, "cannot be read"), (b"", "holds no key"), (b"a\r\nHost: b", "holds no key"), (b"\xe4", "cannot be read")],
)
def test_a_key_that_is_none_is_refused_before_anything_is_asked(tmp_path: Path, key: bytes | None, why: str) -> None:
    if key is not None:
        (tmp_path / "key").write_bytes(key)
    role = RoleConfig(mode="frozen", url="http://h/v1", model="m", key_file=tmp_path / "key")
    with pytest.raises(UserError, match=rf"^roles\.verifier\.key_file: .*key .*{why}"):
        FrozenModels({"verifier": role})
    with pytest.raises(UserError, match=rf"^scorers\.judge\.key_file: .*key .*{why}"):
        TeacherAddress("judge", ScorerConfig(url="http://h/score", key_file=tmp_path / "key"))
