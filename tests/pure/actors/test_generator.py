"""A generator around an engine that is told what to do: files of weights, updates, and its own end."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest

import actors.generator.actor
from actors.engine.run_player import RunPlayer
from actors.engine.vllm_engine import VllmEngine, WeightUpdate
from actors.generator.actor import Generator, Membership
from actors.generator.claimer import Claimer
from actors.generator.outbox import Outbox
from baton.examples import lookup
from service.agents.sessions import session_key
from service.config import Config
from service.config.core_settings import message_limits
from service.errors import ProcessLost, RunFailed, WeightsGone
from service.evaluation.scores import EvalShard
from service.handoff.steps.tables import end_objects, ends_table, steps_table, trajectory_ids
from service.handoff.steps.wire import decode, encode
from service.handoff.verbs import Assignment, Claim, Receipt, Wait, WaitReason
from service.observe.loop_watch import WATCH
from service.observe.metrics import Metrics
from service.rollout import env_guard
from service.rollout.chat.chat import load_chat
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.engine import Generation, Sampling
from service.rollout.environment import AgentSession, Message, StepResult, Task
from service.rollout.prompts.dataset import write_rows
from service.rollout.run_secret import RunSecret
from service.types import NO_VERSION, Int32s, PolicyVersion, Sender, Step, StepGroup, TrajectoryEnd, TrajectoryId
from tests.pure.actors.fakes import answering, until


class FakeEngine:
    """Takes every update or fails with `error`, and answers every prompt at once with an end token."""

    def __init__(self, end_id: int) -> None:
        self.end_id = end_id
        self.error: BaseException | None = None
        self.taken: list[tuple[PolicyVersion, Any, int]] = []
        self.serving, self.running, self.load = PolicyVersion(1, 2), 0, None
        self.counts = {"cached_tokens": 0, "generated_tokens": 0}

    async def update_weights(self, version: PolicyVersion, data: Any, checksum: int) -> WeightUpdate:
        if self.error is not None:
            raise self.error
        self.taken.append((version, data, checksum))
        return WeightUpdate(10, 0.25)

    async def check(self, deadline: float) -> None:
        pass

    def _death(self) -> RunFailed | None:
        return None

    def check_alive(self) -> None:
        VllmEngine.check_alive(self)  # type: ignore[arg-type]

    def measure(self, metrics: Metrics) -> None:
        VllmEngine.measure(self, metrics)  # type: ignore[arg-type]

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        ids, logprobs = np.array([self.end_id], np.int32), np.array([-0.5], np.float32)
        return Generation(ids, logprobs, np.array([self.serving.pack()]), "stop", sampled_end=True)


class FakeBuffer:
    """Gives out the assignments, then is drained; keeps the messages."""

    def __init__(self, *assignments: Assignment) -> None:
        self.answers = [*assignments, Wait(WaitReason.DRAINED, "", 0.0)]
        self.groups: list[StepGroup] = []

    async def claim(self, claim: Claim, seconds: float, most: int) -> list[Assignment] | Wait:
        answer = self.answers.pop(0)
        return [answer] if isinstance(answer, Assignment) else answer

    async def submit(self, data: bytes) -> Receipt:
        group = decode(data, message_limits(Config(), vocab_size=1000))
        assert isinstance(group, StepGroup)
        self.groups.append(group)
        return Receipt()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []
    monkeypatch.setattr(actors.generator.actor, "EXIT_SECONDS", 0.0)
    monkeypatch.setattr(actors.generator.actor.os, "_exit", codes.append)
    return codes


@pytest.fixture
def generator(tmp_path: Path) -> Generator:
    make_tokenizer(tmp_path, lookup.vocabulary())
    write_rows(tmp_path / "train.jsonl", lookup.rows(2, 0))
    nobody = SimpleNamespace()
    return Generator("g", Config().model_dump_json(), str(tmp_path), str(tmp_path / "train.jsonl"), nobody, nobody)


async def test_a_process_that_was_started_again_does_nothing_until_it_is_set_up(
    generator: Generator, tmp_path: Path
) -> None:
    """Ray starts it again by itself; an answer would be taken for that of the process that was there before."""
    assert not (await generator.life()).is_set_up
    shard = EvalShard(0, 1, None)
    for call in (generator.run(), generator.update_weights(1, "/path", 0), generator.evaluate("e", "f", 1, shard)):
        with pytest.raises(ProcessLost, match="g was restarted and is not set up"):
            await call
    join(generator, Config(), tmp_path, FakeBuffer())
    assert (await generator.life()).is_set_up


def join(generator: Generator, config: Config, folder: Path, buffer: FakeBuffer) -> FakeEngine:
    """Give the generator an engine that answers, a buffer, and the configured environment for every row."""
    generator._tasks = [replace(task, env_class=config.env.name) for task in generator._tasks]
    engine = FakeEngine(load_chat(folder, config.generator).end_id)
    generator._engine = engine  # type: ignore[assignment]
    generator._player = RunPlayer(config, folder, engine)
    outbox = Outbox("g", 1, buffer.submit, 60.0, generator._cancel, generator._unmeasured.append)
    generator._joined = Membership(Claimer("g", 1, buffer.claim, lambda: engine.serving, 60.0), outbox)
    return engine


SAMPLES = [TrajectoryId(g, sample, attempt) for g in range(2) for sample, attempt in ((0, 0), (1, 0), (2, 4))]


def two_groups() -> FakeBuffer:
    """A buffer that gives out two groups of three samples, `SAMPLES`."""
    return FakeBuffer(*(Assignment(g, f"lookup-0-{g}", g, (0, 1, 2), (0, 0, 4)) for g in range(2)))


async def played(generator: Generator, buffer: FakeBuffer) -> tuple[list[TrajectoryId], list[TrajectoryEnd]]:
    """Let the generator play until the buffer is drained; returns the steps and the ends, in the order of samples."""
    async with asyncio.timeout(120):
        await generator.run()
    steps = [identity for group in buffer.groups for identity in trajectory_ids(group.steps)]
    return sorted(steps), sorted(end for group in buffer.groups for end in end_objects(group.ends))


def measured(generator: Generator) -> str:
    """The page of its metrics."""
    generator._measure_now(generator._metrics)
    return generator._metrics.snapshot().decode()


async def test_every_sample_of_a_claimed_group_reaches_the_buffer_and_is_counted(
    generator: Generator, tmp_path: Path
) -> None:
    buffer, max_turns = two_groups(), Config().env.max_turns
    engine = join(generator, Config(), tmp_path, buffer)
    steps, ends = await played(generator, buffer)
    assert steps == sorted(SAMPLES * max_turns) and [end.trajectory for end in ends] == SAMPLES
    versions = {version for group in buffer.groups for version in group.steps.versions_N.tolist()}
    assert versions == {engine.serving.pack(), NO_VERSION}
    status = await generator.status()
    assert (status["counts"]["end_max_turns"], status["outbox"]["steps"], status["groups"]) == (6, 6 * max_turns, 0)
    assert status["environments"] == {"lookup": {"trajectories": 6.0}}
    assert f'baton_generated_tokens_total{{ident="g",role="generator"}} {6 * max_turns}.0' in measured(generator)


async def test_groups_that_were_claimed_together_are_played_also_where_there_is_room_for_fewer_by_then(
    generator: Generator, tmp_path: Path
) -> None:
    class Shrinking(FakeBuffer):
        async def claim(self, claim: Claim, seconds: float, most: int) -> list[Assignment] | Wait:
            if claim.request_id > 1:
                return self.answers[-1]  # type: ignore[return-value]
            generator._limit.groups = 1  # as after a preemption in the engine
            return [Assignment(g % 2, f"lookup-0-{g % 2}", g % 2, (g,), (0,)) for g in range(min(most, 3))]

    buffer = Shrinking()
    engine, may_answer, asked = join(generator, Config(), tmp_path, buffer), asyncio.Event(), list[str]()
    answered = engine.generate

    async def generate(prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        asked.append(request_id)
        await may_answer.wait()
        return await answered(prompt_ids, sampling, request_id)

    engine.generate = generate  # type: ignore[method-assign]
    running = asyncio.create_task(generator.run())
    async with asyncio.timeout(120):
        while len(asked) < 3:
            await asyncio.sleep(0.005)
        may_answer.set()
        await running
    assert (await generator.status())["counts"]["groups"] == 3


async def test_each_call_of_an_agent_is_in_the_buffer_before_its_answer_and_a_step_of_its_trajectory(
    generator: Generator, tmp_path: Path
) -> None:
    config = Config.model_validate({"env": {"name": "lookup_agent"}, "agents": {}})
    join(generator, config, tmp_path, buffer := two_groups())
    steps, ends = await played(generator, buffer)
    await generator._player.close()
    assert steps == sorted(SAMPLES * 4)
    page = measured(generator)
    assert 'baton_agent_calls_total{dialect="chat",how="root",ident="g",role="generator"} 6.0' in page
    assert 'baton_agent_calls_total{dialect="chat",how="appended",ident="g",role="generator"} 18.0' in page
    assert 'baton_agent_sessions{ident="g",role="generator",state="idle"} 0.0' in page
    # The next call comes after the answer, so no message can hold two steps of a trajectory.
    for group in buffer.groups:
        assert len(set(trajectory_ids(group.steps))) == len(group.steps)
    assert [(end.trajectory, end.n_steps, end.reward) for end in ends] == [(of, 4, 0.0) for of in SAMPLES]


class HandsOn:
    """An agent whose work goes on elsewhere."""

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        raise AssertionError("the work has begun before")

    async def resume(self, session: AgentSession, task: Task, seed: int) -> None:
        await session.until_finished(60.0)


async def test_a_new_process_goes_on_with_the_sessions_that_its_predecessor_left_and_gives_up_what_is_none(
    generator: Generator, tmp_path: Path
) -> None:
    secret, of = RunSecret(b"secret"), TrajectoryId(0, 1)
    odd = Step(of, "lookup-0-0", 0, *(np.array([5], np.int32),) * 2, None, np.array([True]), np.array([1 << 32 | 2]))
    one = StepGroup(Sender("g", 1, 0), steps_table((odd,)), ends_table(()))
    left = Assignment(0, "lookup-0-0", 0, (0, 1), (0, 0), (b"", encode(one)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"name": f"{__name__}:HandsOn", "trusted_modules": [__name__]}
    config = Config.model_validate({"env": env, "agents": {"port": port}})
    buffer, asked = FakeBuffer(), list[tuple[Any, ...]]()

    def asked_for(answer: Any) -> Any:
        async def remote(*arguments: Any) -> Any:
            asked.append(arguments)
            return answer

        return SimpleNamespace(remote=remote)

    engine = join(generator, config, tmp_path, buffer)
    generator._config, generator._player = config, RunPlayer(config, tmp_path, engine, secret)
    nothing = SimpleNamespace(remote=None)
    generator._buffer = SimpleNamespace(
        join=asked_for(2), unfinished=asked_for((left,)), claim=nothing, submit=nothing, renew=answering()
    )
    assert (await generator._join()).claimer.incarnation == 2
    assert generator._joined is not None
    generator._unfinished = await generator._taken_over(generator._joined)
    assert asked == [("generator", "g", None, True), ("g", 1)]
    assert [assignment.samples for assignment in generator._unfinished] == [(0,)]
    running = asyncio.create_task(generator.run())
    async with asyncio.timeout(60), aiohttp.ClientSession(headers={"x-api-key": session_key(secret, "0-0-0")}) as http:
        while True:
            try:
                async with http.post(f"http://127.0.0.1:{port}/rl/sessions/0-0-0/finish", json={"reward": 1.0}) as said:
                    assert said.status == 200
                break
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.01)
        await running
    await generator._player.close()
    ends = [end for group in buffer.groups for end in end_objects(group.ends)]
    assert [(end.trajectory.sample, end.n_steps, end.stop_reason) for end in ends] == [(1, 1, "abort"), (0, 0, "stop")]


async def test_a_generator_that_leaves_plays_on_for_its_grace_then_hands_over_and_claims_no_more(
    generator: Generator, tmp_path: Path
) -> None:
    buffer, left = FakeBuffer(Assignment(0, "lookup-0-0", 0, (0,), (0,))), list[tuple[Any, ...]]()
    engine, sampling = join(generator, Config(), tmp_path, buffer), asyncio.Event()

    async def never(*arguments: Any) -> Any:
        sampling.set()
        await asyncio.Event().wait()

    async def leave(*arguments: Any) -> None:
        left.append(arguments)

    engine.generate = never  # type: ignore[method-assign]
    generator._buffer = SimpleNamespace(leave=SimpleNamespace(remote=leave))
    buffer.answers.insert(1, Wait(WaitReason.LOOKAHEAD, "", 0.0))
    running = asyncio.create_task(generator.run())
    async with asyncio.timeout(60):
        await sampling.wait()
        await generator.leave(0.01)
        await running
    assert left == [("g", 1, "leaves")] and buffer.groups == []


class Swallows:
    """Swallows the first cancellation of its step and never returns."""

    async def reset(self, task: Task, seed: int) -> list[Message]:
        return list(task.prompt)

    async def step(self, text: str) -> StepResult:
        with suppress(BaseException):
            await asyncio.Event().wait()
        await asyncio.Event().wait()
        return StepResult((), 1.0, True)

    async def close(self) -> None:
        pass


@pytest.fixture
def swallows(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(env_guard, "RETURN_SECONDS", 0.05)
    env = {"name": f"{__name__}:Swallows", "trusted_modules": [__name__], "step_deadline": 0.05}
    return Config.model_validate({"env": env})


async def test_environments_that_swallow_their_cancellation_keep_no_slot_and_are_counted(
    generator: Generator, tmp_path: Path, swallows: Config
) -> None:
    join(generator, swallows, tmp_path, buffer := two_groups())
    _, ends = await played(generator, buffer)
    assert [end.stop_reason for end in ends] == ["environment_timeout"] * 6
    status = await generator.status()
    assert (status["groups"], status["trajectories"], status["leaked_tasks"]) == (0, 0, 6)
    assert 'baton_environment_leaked_tasks{ident="g",role="generator"} 6.0' in measured(generator)


async def test_beyond_the_bound_of_leaked_tasks_the_generator_ends_so_that_its_process_is_renewed(
    generator: Generator, tmp_path: Path, swallows: Config, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_guard, "MAX_LEAKED_TASKS", 2)
    monkeypatch.setattr(generator._limit, "groups", 1)
    join(generator, swallows, tmp_path, buffer := two_groups())
    with pytest.raises(RunFailed, match="3 episodes did not return after they were cancelled"):
        await played(generator, buffer)
    await until(lambda: exits == [1])


async def test_an_update_is_counted_and_a_waiting_claim_looks_again(generator: Generator, tmp_path: Path) -> None:
    engine = join(generator, Config(), tmp_path, FakeBuffer())
    update = await generator.update_weights(PolicyVersion(2, 3).pack(), "/path", 7)  # type: ignore[arg-type]
    assert engine.taken == [(PolicyVersion(2, 3), "/path", 7)]
    assert update == {"bytes": 10, "pause_seconds": 0.25} and generator._counts["updates"] == 1
    assert generator._joined is not None and generator._joined.claimer._look.is_set()


@pytest.mark.parametrize(
    ("error", "codes"),
    [(RunFailed("not loaded in 2 tries"), [1]), (WeightsGone("gone"), []), (ValueError("older"), [])],
)
async def test_an_engine_that_could_not_load_serves_nobody_and_one_that_refused_an_update_is_at_work(
    generator: Generator, tmp_path: Path, exits: list[int], error: BaseException, codes: list[int]
) -> None:
    join(generator, Config(), tmp_path, FakeBuffer()).error = error
    with pytest.raises(type(error), match=str(error)):
        await generator.update_weights(PolicyVersion(2, 3).pack(), b"", 0)
    await asyncio.sleep(0)
    await until(lambda: exits == codes)
    assert generator._counts["updates"] == 0


async def test_a_generator_that_has_started_watches_its_event_loop(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def joined(self: Generator) -> Any:
        return SimpleNamespace()

    async def started(*_: Any) -> Any:
        return {}

    monkeypatch.setattr(Generator, "_join", joined)
    monkeypatch.setattr(Generator, "_taken_over", started)
    monkeypatch.setattr(generator._engine, "start", started)
    monkeypatch.setattr(generator._reporter, "start", lambda: None)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(actors.generator.actor.ray, "get_runtime_context", lambda: context)
    before = {thread for thread in threading.enumerate() if thread.name == WATCH}
    await generator.start()
    assert {thread for thread in threading.enumerate() if thread.name == WATCH} - before
