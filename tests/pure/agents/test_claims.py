"""Sessions that workers on other machines claim, play and finish, and that outlive their generator's process."""

from __future__ import annotations

import asyncio
import gc
import json
import stat
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

from actors.engine.run_player import RunPlayer
from baton.examples import lookup
from service.agents import sessions
from service.agents.offers import Offers
from service.agents.runner.runner import AgentRunner
from service.agents.session import Session
from service.agents.session_keys import SECRET_FILE, Keys, run_keys
from service.agents.sessions import Sessions
from service.agents.worker import work
from service.config import AgentsConfig, Config
from service.config.checks import problems
from service.config.command import AGENT, CommandConfig
from service.config.rollout import EnvConfig, GeneratorConfig
from service.errors import UserError
from service.handoff.steps.builder import steps_table
from service.handoff.steps.reward import MAX_REWARD, NEEDED
from service.handoff.steps.tables import step_objects
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.environment import Task
from service.rollout.prompts.dataset import load_tasks, write_rows
from service.rollout.step_sinks import StepColumns
from service.types import TrajectoryEnd, TrajectoryId
from tests.pure.agents.endpoint import CHAT, whole
from tests.pure.rollout.conftest import ScriptedEngine
from tests.pure.rollout.test_agent import optimal

KEYS = Keys(b"secret of this run", "key-of-all-workers")
OF = TrajectoryId(5, 1)
ASK = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read()}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


@pytest.fixture(scope="module")
def tasks(model: Path) -> list[Task]:
    write_rows(model / "train.jsonl", [row | {"env_class": ""} for row in lookup.rows(4, 0)])
    return load_tasks(model / "train.jsonl")


class Columns(StepColumns):
    """A buffer that answers when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.accepts = True
        self.answers = asyncio.Event()
        self.answers.set()

    async def accepted(self, trajectory: TrajectoryId) -> bool:
        await self.answers.wait()
        return self.accepts


class Served:
    """A generator whose trajectories workers play."""

    def __init__(self, model: Path, keys: Keys = KEYS, tokens: tuple[int, int] = (128, 8), **agents: Any) -> None:
        """`tokens`: most of a prompt, and of a response."""
        self.config = Config(
            env=EnvConfig(name=AGENT, workers="outside"),
            agents=AgentsConfig(**agents),
            generator=GeneratorConfig(max_input_length=tokens[0], max_generate_length=tokens[1]),
        )
        self.engine = ScriptedEngine(Chat(load_tokenizer(model)), optimal)
        self.player = RunPlayer(self.config, model, self.engine, keys)
        self.sink = Columns()
        self.http = aiohttp.ClientSession()

    def play(self, task: Task, of: TrajectoryId = OF) -> asyncio.Task[TrajectoryEnd]:
        return asyncio.create_task(self.player.play(of, task, self.sink))

    @property
    def agents(self) -> Any:
        return self.player.agents

    async def url(self) -> str:
        await self.agents.listen()
        return str(self.agents.address)

    async def post(self, path: str, body: Any = None, key: str = KEYS.worker) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        async with self.http.post(await self.url() + path, json=body or {}, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text else None

    async def claimed(self) -> dict[str, Any]:
        status, claim = await self.post("/rl/claim")
        assert status == 200
        return dict(claim)

    async def aclose(self) -> None:
        await self.http.close()
        await self.player.close()


def asked(task: Task) -> dict[str, Any]:
    return {"model": "m", "messages": [dict(message) for message in task.prompt]}


@asynccontextmanager
async def working(url: str, **settings: Any) -> AsyncIterator[None]:
    runner = AgentRunner(CommandConfig(network="open", **settings))
    task = asyncio.create_task(work([url], KEYS.worker, runner, concurrent=2))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await runner.close()


async def test_a_worker_plays_what_the_generator_offers(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model)) as served:
        command = ("python3", "-c", ASK)
        async with working(await served.url(), command=command, score=("sh", "-c", "echo 0.5")):
            playing = [served.play(task, TrajectoryId(row, 0)) for row, task in enumerate(tasks)]
            ends = await asyncio.gather(*playing)
    assert [(end.reward, end.stop_reason, end.n_steps) for end in ends] == [(0.5, "stop", 1)] * len(tasks)
    assert {step.trajectory for step in step_objects(served.sink.steps())} == {end.trajectory for end in ends}


async def test_a_claim_says_all_that_an_agent_needs(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model, deadline=50.0)) as served:
        playing = served.play(tasks[0])
        claim = await served.claimed()
        url = await served.url()
        assert claim["session"] == "5-1-0" and claim["base_url"] == f"{url}/s/5-1-0/v1"
        assert claim["api_key"] == KEYS.of("5-1-0") and claim["task"]["uid"] == tasks[0].uid
        assert (claim["deadline"], claim["heartbeat_deadline"], claim["state"]) == (50.0, 60.0, "open")
        assert set(claim["sampling"]) == {"temperature", "max_tokens"}
        assert (await served.post("/s/5-1-0" + CHAT, asked(tasks[0]), claim["api_key"]))[0] == 200
        assert (await served.post("/rl/sessions/5-1-0/finish", {"reward": 1.0, "info": {"turns": 2}}))[0] == 200
        end = await playing
        assert (end.reward, end.n_steps) == (1.0, 1)


async def test_a_claim_without_work_ends_empty_and_wrong_keys_claim_nothing(
    model: Path, tasks: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.agents.routes.CLAIM_SECONDS", 0.05)
    async with aclosing(Served(model)) as served:
        assert await served.post("/rl/claim") == (204, None)
        playing = served.play(tasks[0])
        for key in ("", "wrong", KEYS.of("5-1-0"), KEYS.worker + "x"):
            assert (await served.post("/rl/claim", key=key))[0] == 401
        assert (await served.claimed())["session"] == "5-1-0"
        assert await served.post("/rl/claim") == (204, None)
        playing.cancel()
    async with aclosing(Served(model, Keys(b"x"))) as served:
        for key in ("", KEYS.worker):
            status, refused = await served.post("/rl/claim", key=key)
            assert status == 403 and "BATON_WORKER_KEY" in refused["error"]["message"]


async def test_an_agent_manages_its_own_session_and_a_worker_every_one(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model)) as served:
        one, other = served.play(tasks[0]), served.play(tasks[1], TrajectoryId(6, 0))
        for _ in range(2):
            await served.claimed()
        assert (await served.post("/rl/sessions/5-1-0/heartbeat", key="wrong"))[0] == 401
        assert (await served.post("/rl/sessions/7-0-0/heartbeat"))[0] == 404
        for verb in ("heartbeat", "reward", "finish"):
            # The key decides, whatever the path says: another session is never reached.
            assert (await served.post(f"/rl/sessions/6-0-0/{verb}", {"reward": 0.5}, KEYS.of("5-1-0")))[0] == 200
        assert (await one).reward == 0.5 and not other.done()
        async with served.http.get(
            f"{await served.url()}/rl/sessions/6-0-0", headers={"x-api-key": KEYS.worker}
        ) as got:
            assert (await got.json())["state"] == "open"
        other.cancel()


async def test_a_finish_is_answered_once_the_buffer_has_the_end_and_a_repetition_changes_nothing_even_after_a_restart(
    model: Path, tasks: list[Task], tmp_path: Path
) -> None:
    keys = Keys(KEYS.secret, KEYS.worker, tmp_path)
    finish, either_key = "/rl/sessions/5-1-0/finish", (KEYS.worker, KEYS.of("5-1-0"))
    async with aclosing(Served(model, keys)) as served:
        playing = served.play(tasks[0])
        await served.claimed()
        served.sink.answers.clear()
        said = {"reward": 0.25, "status": "ok", "reason": "", "info": {}, "transcript": "hello"}
        finishing = [asyncio.create_task(served.post("/rl/sessions/5-1-0/finish", said)) for _ in range(2)]
        while not served.sink.ends:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(30):  # it does not wait for the buffer
            assert (await served.post("/rl/sessions/5-1-0/finish", {"reward": 1.0}))[0] == 409
        assert (await served.post("/s/5-1-0" + CHAT, asked(tasks[0]), KEYS.of("5-1-0")))[0] == 409
        assert not any(finish.done() for finish in finishing)
        served.sink.answers.set()
        assert [await finish for finish in finishing] == [(200, {})] * 2
        assert (await playing).reward == 0.25
        for key in either_key:
            assert [(await served.post(finish, body, key))[0] for body in (said, {"reward": 1.0})] == [200, 409]
    async with aclosing(Served(model, keys)) as restarted:
        for key in either_key:
            assert [(await restarted.post(finish, body, key))[0] for body in (said, {"reward": 1.0})] == [200, 409]
        assert (await restarted.post(finish, said, "wrong"))[0] == 401
        again = restarted.play(tasks[0])  # the buffer had no end of it: it is open, whatever was noted
        await restarted.claimed()
        assert (await restarted.post(finish, {"reward": 1.0}))[0] == 200
        assert (await again).reward == 1.0


async def test_a_finish_says_what_the_buffer_said(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model)) as served:
        served.sink.accepts = False
        refused, abandoned = served.play(tasks[0]), served.play(tasks[1], TrajectoryId(6, 0))
        for _ in range(2):
            await served.claimed()
        for status in (409, 404):
            assert (await served.post("/rl/sessions/5-1-0/finish", {"reward": 1.0}))[0] == status
            await refused
        served.sink.answers.clear()
        finishing = asyncio.create_task(served.post("/rl/sessions/6-0-0/finish", {"reward": 1.0}))
        while len(served.sink.ends) < 2:
            await asyncio.sleep(0.01)
        abandoned.cancel()
        assert (await finishing)[0] == 503
        with suppress(asyncio.CancelledError):
            await abandoned
        assert (await served.post("/rl/sessions/6-0-0/finish", {"reward": 1.0}))[0] == 404


def test_the_file_of_ended_sessions_holds_the_newest_ones_and_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ENDED", 4)
    file = tmp_path / "ended"
    noted = Sessions(file)
    for number in range(30):
        noted.finished(SimpleNamespace(name=f"s{number}", key=f"key{number}"), f"body{number}")  # type: ignore[arg-type]
        assert len(file.read_text().splitlines()) <= 8
    again = Sessions(file)
    for by_key in (True, False):
        found = [again.finished_with(f"key{number}", None if by_key else f"s{number}") for number in range(30)]
        assert found == [""] * 26 + [f"body{number}" for number in range(26, 30)]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"reward": 2 * MAX_REWARD}, "reward"),
        ({"reward": 0.5, "rewards": {"main": -2 * MAX_REWARD}}, "rewards"),
        ({"reward": MAX_REWARD, "rewards": {"main": MAX_REWARD}}, "rewards"),
        ({"reward": 0.5, "rewards": {"nobody": 1.0}}, "rewards"),
    ],
)
async def test_a_reward_that_the_buffer_would_refuse_is_refused_at_finish_and_the_session_goes_on(
    model: Path, tasks: list[Task], body: dict[str, Any], field: str
) -> None:
    async with aclosing(Served(model)) as served:
        playing = served.play(tasks[0])
        await served.claimed()
        assert (await served.post("/s/5-1-0" + CHAT, asked(tasks[0]), KEYS.of("5-1-0")))[0] == 200
        status, answer = await served.post("/rl/sessions/5-1-0/finish", body)
        assert (status, answer["error"]["param"]) == (400, field)
        assert NEEDED in answer["error"]["message"] or "nobody" in body.get("rewards", {})
        assert (await served.post("/rl/sessions/5-1-0/finish", {"reward": MAX_REWARD}))[0] == 200
        assert (await playing).reward == MAX_REWARD


async def test_what_the_endpoint_refused_stands_in_the_log_and_in_the_reason_of_a_lost_trajectory(
    model: Path, tasks: list[Task], caplog: pytest.LogCaptureFixture
) -> None:
    async with aclosing(Served(model)) as served:
        playing = served.play(tasks[0])
        claim = await served.claimed()
        served.http.headers["User-Agent"] = "OpenAI/Python 2.1"
        for _ in range(3):
            assert (await served.post(CHAT, {"model": "m", "messages": 7}, claim["api_key"]))[0] == 400
        failed = {"status": "failed", "reason": "its exit code was 1", "transcript": "400!\n", "exit_code": 1}
        assert (await served.post("/rl/sessions/5-1-0/finish", failed))[0] == 200
        await playing
    (failure,) = served.player.failures.values()
    why = "400 messages: Expected `array`, got `int` (client OpenAI/Python 2.1)"
    assert failure.endswith(f": its exit code was 1\n    400!\n    refused 3 times: {why}")
    assert caplog.text.count(f"a request of session 5-1-0 is refused: {why}") == 1


@pytest.mark.parametrize("fault", ["silent", "late", "aborted", "failed"])
async def test_a_session_without_an_end_is_lost_and_its_trajectory_attempted_again(
    model: Path, tasks: list[Task], fault: str
) -> None:
    deadlines = {"silent": {"heartbeat_deadline": 0.2}, "late": {"deadline": 0.4, "heartbeat_deadline": 30.0}}
    async with aclosing(Served(model, **deadlines.get(fault, {}))) as served:
        playing = served.play(tasks[0])
        await asyncio.sleep(0.3)  # an offer that waits has no deadline
        await served.claimed()
        if fault == "aborted":
            for _ in range(2):
                assert (await served.post("/rl/sessions/5-1-0/abort"))[0] == 200 or playing.done()
        elif fault == "failed":
            await served.post("/rl/sessions/5-1-0/finish", {"status": "failed", "reason": "no disk"})
        while not playing.done() and fault == "late":
            await served.post("/rl/sessions/5-1-0/heartbeat")
            await asyncio.sleep(0.05)
        end = await playing
    assert end.stop_reason == ("environment_error" if fault in ("aborted", "failed") else "environment_timeout")
    assert len(served.agents.offers) == 0 and len(served.agents.sessions) == 0


async def test_heartbeats_and_calls_keep_a_session(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model, heartbeat_deadline=0.6)) as served:
        playing = served.play(tasks[0])
        await served.claimed()
        for turn in range(6):
            await asyncio.sleep(0.2)
            if turn % 2:
                assert (await served.post("/rl/sessions/5-1-0/heartbeat"))[0] == 200
            else:
                body = asked(tasks[0]) | {"user": str(turn)}
                assert (await served.post("/s/5-1-0" + CHAT, body, KEYS.of("5-1-0")))[0] == 200
        assert not playing.done()
        playing.cancel()


async def test_a_session_outlives_its_generators_process(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model)) as served:
        served.play(tasks[0])
        claim = await served.claimed()
        path = "/s/5-1-0" + CHAT
        _, first = await served.post(path, asked(tasks[0]), claim["api_key"])
        steps = steps_table(step_objects(served.sink.steps()))
    async with aclosing(Served(model)) as again:
        assert again.player.restore(OF, tasks[0], steps, again.sink)
        playing = again.play(tasks[0])
        assert (await again.post("/rl/sessions/5-1-0/heartbeat"))[0] == 200
        assert len(again.agents.offers) == 0
        _, repeated = await again.post(path, asked(tasks[0]), claim["api_key"])
        assert repeated["choices"] == first["choices"] and not len(again.sink)
        body = asked(tasks[0])
        body["messages"] += [first["choices"][0]["message"], {"role": "user", "content": "none"}]
        assert (await again.post(path, body, claim["api_key"]))[0] == 200
        assert (await again.post("/rl/sessions/5-1-0/finish", {"reward": 1.0}))[0] == 200
        assert (await playing).n_steps == 2
        later = step_objects(again.sink.steps())
        assert [step.index for step in later] == [1]
        whole([*step_objects(steps), *later])  # the reference holds


async def test_a_restored_session_of_which_nothing_is_heard_is_attempted_again(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model, heartbeat_deadline=0.2)) as served:
        assert served.player.restore(OF, tasks[0], steps_table(()), served.sink)
        assert (await served.play(tasks[0])).stop_reason == "environment_timeout"
    other = Config(env=EnvConfig(), agents=AgentsConfig())
    assert not RunPlayer(other, model, served.engine).restore(OF, tasks[0], steps_table(()), served.sink)


async def test_offers_are_claimed_in_order_each_once_and_given_back_where_nobody_got_one(
    model: Path, tasks: list[Task]
) -> None:
    async with aclosing(Served(model)) as served:
        playing = [served.play(tasks[0], TrajectoryId(row, 0)) for row in range(3)]
        await served.url()
        while len(served.agents.offers) < len(playing):
            await asyncio.sleep(0.01)
        offers: Offers = served.agents.offers
        by_state = served.agents.sessions.by_state
        assert by_state() == {"calling": 0, "idle": 0, "offered": 3}
        first = await offers.claim(1.0)
        assert first is not None and first.session.name == "0-0-0"
        offers.offer(first)
        names = [(await served.claimed())["session"] for _ in playing]
        assert by_state() == {"calling": 0, "idle": 3}
        assert sorted(names) == ["0-0-0", "1-0-0", "2-0-0"]
        assert await offers.claim(0.01) is None
        for one in playing:
            one.cancel()


async def test_an_offer_wakes_one_claim_of_those_that_wait(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Served(model)) as served:
        await served.url()
        claims = [asyncio.create_task(served.agents.offers.claim(30.0)) for _ in range(2000)]
        await asyncio.sleep(0.05)
        before = time.process_time()
        playing = []
        for row in range(100):
            playing.append(served.play(tasks[0], TrajectoryId(row, 0)))
            while sum(claim.done() for claim in claims[: row + 1]) <= row:
                await asyncio.sleep(0)
        assert time.process_time() - before < 0.7
        for task in (*playing, *claims):
            task.cancel()
        await asyncio.wait([*playing, *claims])


async def test_a_session_that_nobody_plays_yet_is_finished_only_once_the_buffer_has_its_end(
    model: Path, tasks: list[Task]
) -> None:
    async with aclosing(Served(model)) as served:
        assert served.player.restore(OF, tasks[0], steps_table(()), served.sink)
        finishing = asyncio.create_task(served.post("/rl/sessions/5-1-0/finish", {"reward": 1.0}))
        await asyncio.wait({finishing}, timeout=0.2)
        assert not finishing.done()
        assert (await served.play(tasks[0])).reward == 1.0
        assert await finishing == (200, {})


# -- keys --------------------------------------------------------------------------------------------------------------


def test_the_keys_of_a_run_last_and_only_its_user_reads_their_secret(tmp_path: Path) -> None:
    keys = run_keys(tmp_path, AgentsConfig(), "key-of-all-workers", True)
    assert keys == run_keys(tmp_path, AgentsConfig(), "key-of-all-workers", True)
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600
    assert keys.of("1-0-0") != keys.of("1-0-1") and len(keys.of("1-0-0")) == 22
    assert keys.secret.hex() not in repr(keys) and keys.worker not in f"{keys}"
    other = run_keys(tmp_path / "other", AgentsConfig(), "key-of-all-workers", True)
    assert other.of("1-0-0") != keys.of("1-0-0")
    assert run_keys(tmp_path, AgentsConfig(), "", False).worker == ""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("", "needs a worker key; give agents.worker_key_file, or set BATON_WORKER_KEY"),
        ("short", "BATON_WORKER_KEY: a worker key has at least 16"),
        ("with spaces in the key", "BATON_WORKER_KEY: a worker key has at least 16"),
        ("schlüssel-der-arbeiter", "BATON_WORKER_KEY: a worker key has at least 16"),
    ],
)
def test_a_worker_key_that_is_none_is_one_clear_line(tmp_path: Path, key: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        run_keys(tmp_path, AgentsConfig(), key, True)
    assert "\n" not in str(error.value) and (not key or key not in str(error.value))


@pytest.mark.parametrize(("text", "line"), [(None, "cannot be read"), ("", "is empty"), ("é" * 20, "cannot be read")])
def test_a_file_that_holds_no_worker_key_is_one_clear_line(tmp_path: Path, text: str | None, line: str) -> None:
    file = tmp_path / "key"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=f"agents.worker_key_file: {file}: {line}"):
        run_keys(tmp_path, AgentsConfig(worker_key_file=file), "key-of-the-environment", True)
    file.write_text("key-of-the-file-000\n")
    keys = run_keys(tmp_path, AgentsConfig(worker_key_file=file), "key-of-the-environment", True)
    assert keys.is_worker("key-of-the-file-000") and not keys.is_worker("key-of-the-environment")


def test_a_secret_that_is_none_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / SECRET_FILE).write_text("no hex")
    with pytest.raises(UserError, match="no secret of a run"):
        run_keys(tmp_path, AgentsConfig(), "key-of-all-workers", True)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"env": {"workers": "outside"}}, "env.workers"),
        ({"env": {"workers": "outside", "name": AGENT}}, "agents.port"),
        ({"env": {"workers": "outside", "name": AGENT}, "agents": {"port": 8400}}, None),
        ({"generator": {"engines": 2}, "agents": {"port": 65535}}, "agents.port"),
        ({"generator": {"engines": 2}, "agents": {"port": 65534}}, None),
    ],
)
def test_settings_with_which_no_worker_could_come_are_refused(changed: dict[str, Any], path: str | None) -> None:
    found = {problem.partition(":")[0] for problem in problems(Config.model_validate(changed))}
    assert found & {"env.workers", "agents.port", "env.command"} == ({path} if path else set())


@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.full)])
async def test_of_sessions_that_were_abandoned_nothing_is_left_and_the_next_one_goes_on(
    model: Path, tasks: list[Task], count: int
) -> None:
    async with aclosing(Served(model, heartbeat_deadline=0.3)) as served:
        await served.url()
        await abandoned(served, tasks[0], 10)
        before = left_of(served)
        ends = await abandoned(served, tasks[0], count)
        assert {end.stop_reason for end in ends} == {"environment_timeout"}
        assert left_of(served) == before
        playing = served.play(tasks[0])
        claim = await served.claimed()
        assert (await served.post(CHAT, asked(tasks[0]), claim["api_key"]))[0] == 200
        assert (await served.post(f"/rl/sessions/{claim['session']}/finish", {"reward": 1.0}))[0] == 200
        assert (await playing).reward == 1.0


async def abandoned(served: Served, task: Task, count: int) -> list[TrajectoryEnd]:
    """The ends of sessions that a worker claims, calls once, and never speaks of again."""
    playing = [served.play(task, TrajectoryId(group, 0)) for group in range(count)]
    for _ in range(count):
        claim = await served.claimed()
        await served.post(CHAT, asked(task), claim["api_key"])
    return await asyncio.gather(*playing)


def left_of(served: Served) -> tuple[int, ...]:
    """Open sessions and offers; objects and tasks of sessions; open files of this process."""
    gc.collect()
    objects = sum(type(thing) is Session for thing in gc.get_objects())
    files = psutil.Process().num_fds()
    return len(served.agents.sessions), len(served.agents.offers), objects, len(asyncio.all_tasks()), files
