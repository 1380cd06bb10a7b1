"""Trajectories of agents as the generator plays them: the quick start's task by programs with clients of their own."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from traceback import FrameSummary
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
import ray
from openai import APIStatusError, AsyncOpenAI, OpenAI

from actors.engine.run_player import RunPlayer
from baton.examples import lookup
from service.config import AgentsConfig, Config
from service.config.checks import problems
from service.config.core_settings import message_limits, worst_bytes
from service.config.rollout import AGENT, EnvConfig, GeneratorConfig
from service.errors import UserError
from service.evaluation.play import play_shard
from service.evaluation.scores import EvalShard
from service.handoff.group_bytes import ITEM_BYTES, SAID_BYTES, TOKEN_BYTES, TRANSCRIPT_BYTES
from service.handoff.steps.tables import step_objects
from service.handoff.validate import refusal
from service.observe import loop_watch
from service.observe.loop_watch import BLOCKED_SECONDS, LoopWatch, _place
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.check_inputs import check_inputs
from service.rollout.env_guard import call_agent
from service.rollout.environment import AgentSession, Task
from service.rollout.step_sinks import StepColumns
from service.types import Sender, Step, TrajectoryEnd, TrajectoryId
from tests.pure.agents.endpoint import whole
from tests.pure.agents.talks import TALKS
from tests.pure.rollout.conftest import ScriptedEngine
from tests.pure.rollout.test_agent import optimal

HERE = __name__
DOES = f"{HERE}:Does"


def facts_told(task: Task, said: str) -> str | None:
    """What the store says to a lookup; None after an answer."""
    match said.split():
        case ["look", entity, attribute]:
            return lookup.puzzle(int(task.extra_info["seed"])).facts.get((entity, attribute), "none")
        case _:
            return None


def reward_of(task: Task, said: str) -> float:
    return float(said.split()[1:] == [task.reward_spec["ground_truth"]])


class OverHttp:
    """Solves the task in a dialect, by name, without an SDK."""

    def __init__(self, dialect: str) -> None:
        self.talk = next(make for make in TALKS if make.path == dialect)

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        talk = self.talk(task.prompt[0]["content"])
        url = session.base_url.removesuffix("/v1") + talk.path
        async with aiohttp.ClientSession(headers={"x-api-key": session.key}) as http:
            while True:
                body = {name: value for name, value in talk.body().items() if name not in ("tools", "system")}
                body.pop("instructions", None)
                if "messages" in body:  # as the environment has it, which has no system message
                    body["messages"] = [message for message in body["messages"] if message["role"] != "system"]
                async with http.post(url, json=body) as answer:
                    reply = await answer.json()
                said = talk.text(reply)
                if (told := facts_told(task, said)) is None:
                    break
                talk.answered(reply, told)
        session.finish(reward_of(task, said))


ENDS: Mapping[str, tuple[Any, ...]] = {
    "no reward": (None,),
    "an infinite reward": (float("inf"),),
    "a failure": (None, "failed"),
    "a failure with a reward": (0.5, "failed"),
    "numbers of numpy": (np.float32(0.5), "ok", {"looks": np.int64(2)}),
    "a text": ("1.0",),
    "an unknown status": (1.0, "fine"),
    "an array in info": (1.0, "ok", {"a": np.ones(2)}),
    "a name beyond the limit": (1.0, "ok", {"a" * 10**7: 1.0}),
}
"""What an agent gives to `finish`."""


KEYS: list[str] = []
"""Keys of the sessions of agents that say theirs."""


class Does:
    """An agent that does what its option says: a deed of its own, or to finish with values of `ENDS`."""

    def __init__(self, what: str) -> None:
        self.what = what

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        match self.what:
            case "raises":
                async with AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
                    said: Any = dict(task.prompt[0])
                    await client.chat.completions.create(model="policy", messages=[said])
                raise RuntimeError("broken agent")
            case "raises a refusal" | "raises what is too long":
                more = {"logit_bias": {"5": 1}} if "refusal" in self.what else {}
                async with AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
                    said = dict(task.prompt[0], content="age " * (1 if more else 1000))
                    await client.chat.completions.create(model="policy", messages=[said], **more)
            case what if what.startswith("swallows "):
                async with AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
                    said = {"model": "policy", "messages": [dict(task.prompt[0])]}
                    await client.chat.completions.create(**said)
                    with suppress(APIStatusError):
                        path = f"/{what.split()[1]}"
                        await client.post(path, cast_to=object, body={**said, "logit_bias": {"5": 1}})
                    if what.endswith("asks again"):
                        await client.chat.completions.create(**said)
                session.finish(0.5)
            case "calls after its end":
                session.finish(0.5)
                async with AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0) as client:
                    said = dict(task.prompt[0])
                    with pytest.raises(APIStatusError):
                        await client.chat.completions.create(model="policy", messages=[said])
            case "says its key":
                KEYS.append(session.key)
                session.finish(1.0, transcript=f"called with {session.key}, twice")
            case "raises its key":
                KEYS.append(session.key)
                raise RuntimeError(f"the key {session.key} was refused")
            case "hangs":
                await asyncio.Event().wait()
            case "forgets to finish":
                return
            case what:
                session.finish(*ENDS[what])


def settings(name: str, agents: AgentsConfig | None = None, **options: Any) -> Config:
    return Config(
        env=EnvConfig(name=name, trusted_modules=(HERE,), options=options),
        agents=agents or AgentsConfig(),
        generator=GeneratorConfig(max_input_length=128, max_generate_length=8),
    )


def commanded(command: tuple[str, ...], agents: AgentsConfig | None = None) -> Config:
    return settings(AGENT, agents).model_copy(update={"env": EnvConfig(name=AGENT, command=command)})


class Playing:
    """A player whose policy solves the task."""

    def __init__(self, model: Path, config: Config) -> None:
        self.engine = ScriptedEngine(Chat(load_tokenizer(model)), optimal)
        self.config, self.player = config, RunPlayer(config, model, self.engine)

    async def one(self, task: Task, of: TrajectoryId) -> tuple[list[Step], TrajectoryEnd]:
        """A trajectory, whose message the buffer's rules accept."""
        columns = StepColumns()
        end = await self.player.play(of, task, columns)
        assert columns.ends == [end]
        group = columns.step_group(Sender("g", 1, 1))
        assert refusal(group, message_limits(self.config, self.engine.chat.vocab_size)) is None
        return step_objects(columns.steps()), end

    async def aclose(self) -> None:
        await self.player.close()


@pytest_asyncio.fixture(loop_scope="function")
async def environment(model: Path) -> AsyncIterator[Playing]:
    async with aclosing(Playing(model, settings("lookup"))) as made:
        yield made


@pytest.mark.parametrize(
    ("agent", "options"),
    [("lookup_agent", {}), *((f"{HERE}:OverHttp", {"dialect": make.path}) for make in TALKS)],
    ids=["openai", *(make.path for make in TALKS)],
)
async def test_a_program_with_its_own_client_makes_the_trajectories_of_the_environment_token_for_token(
    model: Path, tasks: list[Task], environment: Playing, agent: str, options: dict[str, Any]
) -> None:
    async with aclosing(Playing(model, settings(agent, **options))) as agents:
        of = [TrajectoryId(row, 0) for row in range(len(tasks))]
        made = await asyncio.gather(*(agents.one(task, one) for task, one in zip(tasks, of, strict=True)))
        for task, one, (steps, end) in zip(tasks, of, made, strict=True):
            expected, expected_end = await environment.one(task, one)
            assert end._replace(rewards=(), info=expected_end.info) == expected_end and end.reward == 1.0
            assert end.info == expected_end.info.replace("lookup", agent, 1)
            assert end.rewards == tuple(step.reward for step in expected)
            assert whole(steps) == whole(expected)
            for step, other in zip(steps, expected, strict=True):
                for column in ("response_ids", "loss_mask", "versions", "logprobs"):
                    assert getattr(step, column).tolist() == getattr(other, column).tolist()
                assert (step.index, step.extends, step.temperature) == (other.index, other.extends, other.temperature)


async def test_an_evaluation_plays_agents_too(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Playing(model, settings("lookup_agent"))) as agents:
        path, shard = model / "train.jsonl", EvalShard()
        assert len(tasks) == 6
        assert {one.reward for one in await play_shard(agents.player, "dev", path, 1, shard, concurrency=3)} == {1.0}


@pytest.mark.parametrize(
    ("what", "reason", "why"),
    [
        ("raises", "environment_error", "RuntimeError: broken agent"),
        ("forgets to finish", "environment_reward", "finished no session"),
        ("hangs", "environment_timeout", "no answer after"),
        ("no reward", "environment_error", "without a reward, as 'ok'"),
        ("an infinite reward", "environment_reward", "session.finish: reward"),
        ("a failure", "environment_error", "as 'failed'"),
        ("a failure with a reward", "stop", ""),
        ("numbers of numpy", "stop", ""),
        ("a text", "environment_reward", "session.finish: reward"),
        ("an unknown status", "environment_error", "session.finish: status"),
        ("an array in info", "environment_error", "session.finish: info"),
        ("a name beyond the limit", "environment_error", "session.finish: info"),
    ],
)
async def test_an_agent_that_fails_or_finishes_with_what_is_not_allowed_loses_its_own_trajectory(
    model: Path, tasks: list[Task], what: str, reason: str, why: str
) -> None:
    config = settings(DOES, AgentsConfig(deadline=0.3 if what == "hangs" else 60.0), what=what)
    async with aclosing(Playing(model, config)) as agents:
        _, end = await agents.one(tasks[0], TrajectoryId(0, 0))
        assert (end.stop_reason, end.n_steps) == (reason, what == "raises")
        assert (end.reward, type(end.reward)) == (0.5 if reason == "stop" else 0.0, float)
        failure = "".join(agents.player.failures.values())
        assert why in failure and bool(failure) == bool(why) and len(failure) < 1000
        assert agents.player.agents is not None and len(agents.player.agents.sessions) == 0


SOON = 3.0
"""A deadline in which a call is answered on a busy machine too."""
FREED = threading.Event()
"""Set when an agent need not block any more."""


class Plays:
    """An agent without a coroutine: it blocks its thread, and ends as its option says."""

    def __init__(self, how: str) -> None:
        self.how = how

    def play(self, session: AgentSession, task: Task, seed: int) -> None:
        with OpenAI(base_url=session.base_url, api_key=session.key, timeout=30.0, max_retries=0) as client:
            said: Any = dict(task.prompt[0])
            client.chat.completions.create(model="policy", messages=[said])
        match self.how:
            case "finishes":
                session.finish(0.5)
            case "finishes twice":
                session.finish(0.5)
                session.finish(0.25)
            case "exits":
                sys.exit("enough")
            case "stops":
                raise StopIteration
            case "blocks":
                FREED.wait(60)


@pytest.mark.parametrize(
    ("how", "reason", "why"),
    [
        ("finishes", "stop", ""),
        ("finishes twice", "stop", ""),
        ("exits", "environment_error", "SystemExit: enough"),
        ("stops", "environment_error", "StopIteration"),
        ("blocks", "environment_timeout", f"no answer after {SOON:g} s"),
    ],
)
async def test_a_plain_function_plays_in_a_thread_and_fails_as_a_coroutine_does(
    model: Path, tasks: list[Task], how: str, reason: str, why: str
) -> None:
    config = settings(f"{HERE}:Plays", AgentsConfig(deadline=SOON if how == "blocks" else 60.0), how=how)
    FREED.clear()
    check_inputs(config.env, config.data, 0, has_endpoint=True, functions=())
    async with aclosing(Playing(model, config)) as agents:
        (step,), end = await agents.one(tasks[0], TrajectoryId(0, 0))
        FREED.set()
        assert (end.stop_reason, end.reward) == (reason, 0.5 if reason == "stop" else 0.0) and step.loss_mask.all()
        assert why in "".join(agents.player.failures.values()) and bool(why) == bool(agents.player.failures)


class MadeTime:
    """Time that stands still, except while `blocks` runs: then each look takes `step` seconds. Made in an event loop;
    who sleeps while time stands still wakes when it goes on, or when the loop is closed."""

    def __init__(self) -> None:
        self.now, self.step, self.is_blocking = 1.0, 1.0, False
        self._loop = asyncio.get_running_loop()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.005)
        while not (self.is_blocking or self._loop.is_closed()):
            time.sleep(0.005)
        self.now += self.step

    def blocks(self) -> None:
        looks, self.is_blocking = self.now + 20 * self.step, True
        while self.now < looks:
            threading.Event().wait(0.01)
        self.is_blocking = False

    def blocks_too(self) -> None:
        self.blocks()

    async def passes(self, block: Callable[[], None]) -> None:
        """The event loop turns, calls this, and turns again."""
        await asyncio.sleep(0.1)
        asyncio.get_running_loop().call_soon(block)
        await asyncio.sleep(0.1)


async def test_each_place_that_blocks_is_told_once_to_whoever_asks_and_none_while_the_process_was_stopped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = MadeTime()
    monkeypatch.setattr("service.observe.loop_watch.time", made)
    monkeypatch.setattr("service.observe.loop_watch.LOOK_SECONDS", 0.01)
    watch = LoopWatch()
    made.step = 2 * BLOCKED_SECONDS
    await made.passes(made.blocks)
    assert not caplog.messages
    made.step = BLOCKED_SECONDS / 5
    for block in (made.blocks, made.blocks_too, made.blocks):
        await made.passes(block)
    for known, name in enumerate(["blocks", "blocks_too"]):
        line = await asyncio.wait_for(watch.blocked(known), 5.0)
        assert re.search(rf"by test_play.py:\d+ {name}, in threading.py:\d+ wait:", line)
        assert "set env.isolation=process" in line
    assert len([line for line in caplog.messages if "event loop" in line]) == 3
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watch.blocked(2), 0.1)


def test_what_ray_blocks_is_told_as_no_code_of_users() -> None:
    files = [asyncio.__file__, f"{Path(loop_watch.__file__).parents[2]}/actors/generator/outbox.py", ray.__file__]
    stack = [FrameSummary(file, 7, "of") for file in files]
    assert _place(stack) == ("__init__.py:7 of", False)
    assert _place([*stack[:2], FrameSummary("my_agent.py", 7, "play")])[1]


class WaitsInAThread:
    def __init__(self) -> None:
        self.returns = threading.Event()

    def play(self, session: AgentSession, task: Task, seed: int) -> None:
        self.returns.wait(60.0)


async def test_a_cancelled_thread_is_waited_for_until_it_returns_or_is_cancelled_again(tasks: list[Task]) -> None:
    for times in (1, 2):
        agent, session = WaitsInAThread(), SimpleNamespace(base_url="", key="")
        playing = asyncio.ensure_future(call_agent(agent.play, session, tasks[0], 0))  # type: ignore[arg-type]
        for _ in range(times):
            assert not (await asyncio.wait([playing], timeout=0.1))[0]
            playing.cancel()
        assert bool((await asyncio.wait([playing], timeout=0.1))[0]) == (times == 2)
        agent.returns.set()
        await asyncio.wait([playing], timeout=60.0)
        assert playing.cancelled()


FAILS = ("sh", "-c", "seq 100; echo no room left on the device >&2; exit 3")


@pytest.mark.parametrize(
    ("name", "what", "agents", "end"),
    [
        (DOES, "raises", {}, ("environment_error", 0.0)),
        (DOES, "raises", {"RuntimeError": -0.5}, ("stop", -0.5)),
        (DOES, "raises", {"ValueError": -0.5, "1": 1.0}, ("environment_error", 0.0)),
        (DOES, "raises a refusal", {"BadRequestError": 0.5}, ("environment_error", 0.0)),
        (DOES, "raises what is too long", {"BadRequestError": -0.5}, ("length", -0.5)),
        (AGENT, FAILS, {3: 0.25}, ("stop", 0.25)),
        (AGENT, ("sh", "-c", "exit 0"), {4: 0.25}, ("environment_error", 0.0)),
    ],
)
async def test_a_failure_that_has_a_reward_is_trained_and_any_other_starts_again(
    model: Path, tasks: list[Task], name: str, what: Any, agents: dict[Any, float], end: tuple[str, float]
) -> None:
    rewards = AgentsConfig(exit_code_reward=agents)
    config = settings(DOES, rewards, what=what) if name == DOES else commanded(what, rewards)
    again = Config.model_validate_json(config.model_dump_json())
    assert again.agents == config.agents
    async with aclosing(Playing(model, again)) as playing:
        _, ended = await playing.one(tasks[0], TrajectoryId(0, 0))
        assert (ended.stop_reason, ended.reward) == end
        assert list(playing.player.failures) == [end[0]] * (end[0] == "environment_error")


@pytest.mark.parametrize(
    ("what", "refused"),
    [
        ("swallows chat/completions", "400 logit_bias"),
        ("swallows v1/messages", "404 there is no POST"),
        ("swallows chat/completions and asks again", ""),
        ("swallows messages/count_tokens", ""),
        ("swallows embeddings", ""),
        ("calls after its end", ""),
    ],
)
async def test_an_agent_that_takes_a_refusal_for_an_answer_is_not_trained(
    model: Path, tasks: list[Task], what: str, refused: str
) -> None:
    async with aclosing(Playing(model, settings(DOES, what=what))) as agents:
        _, end = await agents.one(tasks[0], TrajectoryId(0, 0))
    assert (end.stop_reason, end.reward) == (("environment_error", 0.0) if refused else ("stop", 0.5))
    if refused:
        assert f"newest request was refused: {refused}" in agents.player.failures["environment_error"]


async def test_a_command_that_fails_says_why_with_the_end_of_its_output(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Playing(model, commanded(FAILS))) as agents:
        _, end = await agents.one(tasks[0], TrajectoryId(0, 0))
    first = "environment_error: the agent ended without a reward, as 'failed': its exit code was 3"
    lines = [first, *(f"    {number}" for number in range(82, 101)), "    no room left on the device"]
    assert agents.player.failures == {"environment_error": "\n".join(lines)}
    assert end.transcript.decode().startswith(f"{first}\n\n1\n2\n")


async def test_an_agent_that_says_its_key_has_it_in_no_log_status_or_transcript(
    model: Path, tasks: list[Task], caplog: pytest.LogCaptureFixture
) -> None:
    for what, shown in (("says its key", "called with [key], twice"), ("raises its key", "the key [key] was refused")):
        async with aclosing(Playing(model, settings(DOES, what=what))) as agents:
            _, end = await agents.one(tasks[0], TrajectoryId(0, 0))
        said = f"{end.transcript.decode()} {agents.player.failures} {caplog.text}"
        assert shown in said and KEYS[-1] not in said


@pytest.mark.parametrize("host", ["127.0.0.1", "no.such.host.invalid", "a" * 64])
async def test_an_address_that_cannot_be_taken_is_one_clear_line(model: Path, tasks: list[Task], host: str) -> None:
    taken = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    named = "port" if host == "127.0.0.1" else "host"
    agents = AgentsConfig(host=host, port=port)
    async with taken, aclosing(Playing(model, settings(DOES, agents, what="hangs"))) as playing:
        with pytest.raises(UserError, match=f"agents.{named}: the endpoint cannot listen on {host}, port {port}"):
            await playing.one(tasks[0], TrajectoryId(0, 0))


async def test_admission_reserves_what_a_session_may_have() -> None:
    config = settings("lookup", AgentsConfig(max_calls=1000, max_tokens=100_000))
    assert (
        worst_bytes(config).trajectory
        == 100_000 * TOKEN_BYTES + 1001 * ITEM_BYTES + 1000 * SAID_BYTES + TRANSCRIPT_BYTES
    )
    assert message_limits(config, 100).max_turns == 1000
    assert not [problem for problem in problems(config) if problem.startswith("agents")]


COMMAND = """
import json, os, urllib.request
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
base = os.environ["OPENAI_BASE_URL"]
asked = {"model": "policy", "messages": [{"role": "user", "content": input()}]}
said = post(base + "/chat/completions", asked)["choices"][0]["message"]["content"]
post(base.split("/s/")[0] + "/rl/sessions/mine/reward", {"reward": len(said.split())})
"""


async def test_a_command_is_played_by_the_runner_and_may_post_its_own_reward(model: Path, tasks: list[Task]) -> None:
    async with aclosing(Playing(model, commanded(("python3", "-c", COMMAND)))) as agents:
        (step,), end = await agents.one(tasks[0], TrajectoryId(0, 0))
    assert agents.player.failures == {}
    assert (end.reward, end.stop_reason) == (3.0, "stop") and step.loss_mask.all()


async def test_a_command_that_ends_leaves_the_commands_of_other_trajectories_running(
    model: Path, tasks: list[Task], tmp_path: Path
) -> None:
    """The second trajectory's command ends once the file is there, which is made after the first one's end."""
    waits = 'read -r question; case "$question" in "$0") ;; *) while [ ! -e "$1" ]; do sleep 0.1; done;; esac'
    first, go_on = tasks[0].prompt[0]["content"].splitlines()[0], tmp_path / "go_on"
    config = commanded(("sh", "-c", waits, first, str(go_on)))
    config = config.model_copy(update={"env": config.env.model_copy(update={"score": ("echo", "0.5")})})
    async with aclosing(Playing(model, config)) as agents, asyncio.timeout(60):
        other = asyncio.create_task(agents.one(tasks[1], TrajectoryId(1, 0)))
        _, end = await agents.one(tasks[0], TrajectoryId(0, 0))
        go_on.touch()
        assert [end.reward, (await other)[1].reward] == [0.5, 0.5] and agents.player.failures == {}


async def test_an_agent_without_an_endpoint_is_refused_before_the_run(model: Path) -> None:
    config = settings(DOES, what="hangs").model_copy(update={"agents": None})
    with pytest.raises(UserError, match="calls the policy over HTTP; add agents"):
        check_inputs(config.env, config.data, 0, has_endpoint=False, functions=())
