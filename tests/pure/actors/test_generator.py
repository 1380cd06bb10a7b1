"""A generator around an engine that is told what to do: files of weights, updates, and its own end."""

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import actors.generator.actor
import actors.generator.gateway
from actors.engine.run_player import RunPlayer
from actors.engine.vllm_engine import VllmEngine, WeightUpdate
from actors.generator.actor import Generator, Membership
from actors.generator.claimer import Claimer
from actors.generator.outbox import Outbox
from baton.examples import lookup
from service.config import Config
from service.config.core_settings import message_limits
from service.config.rollout import AgentsConfig
from service.errors import ProcessLost, RunFailed, WeightsGone
from service.evaluation.scores import EvalShard
from service.handoff.steps.tables import end_objects, trajectory_ids
from service.handoff.steps.wire import decode
from service.handoff.verbs import Assignment, Claim, Receipt, Wait, WaitReason
from service.observe.loop_watch import WATCH
from service.observe.metrics import Metrics
from service.rollout import env_guard
from service.rollout.chat.chat import load_chat
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.engine import Generation, Sampling
from service.rollout.environment import Message, StepResult, Task
from service.rollout.prompts.rows import write_rows
from service.rollout.run_secret import RunSecret
from service.types import (
    NO_VERSION,
    Int32s,
    PolicyVersion,
    Refusal,
    RefusalReason,
    StepGroup,
    TrajectoryEnd,
    TrajectoryId,
)
from tests.pure.actors.fakes import answering, died, until


class FakeEngine:
    """Takes every update or fails with `error`, and answers every prompt at once with an end token."""

    def __init__(self, end_id: int) -> None:
        self.end_id = end_id
        self.error: BaseException | None = None
        self.taken: list[tuple[PolicyVersion, Any, int]] = []
        self.serving, self.running, self.cached_tokens, self.load = PolicyVersion(1, 2), 0, 0, None

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
    assert status["counts"] == {"end_max_turns": 6}
    assert f'baton_generated_tokens_total{{ident="g",role="generator"}} {6 * max_turns}.0' in measured(generator)


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
    assert (generator._groups, generator._playing) == (0, {})
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
    await generator.update_weights(PolicyVersion(2, 3).pack(), "/path", 7)  # type: ignore[arg-type]
    assert engine.taken == [(PolicyVersion(2, 3), "/path", 7)]
    assert 'baton_weight_sync_bytes_total{ident="g",role="generator"} 10.0' in measured(generator)
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
    assert "baton_weight_sync_bytes_total" not in measured(generator)


async def test_the_sessions_of_a_generator_whose_place_is_taken_move(
    generator: Generator, tmp_path: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, abandoned = FakeBuffer(), list[bool]()
    buffer.answers = [Refusal(RefusalReason.FENCED, "incarnation", 1)]  # type: ignore[list-item]
    join(generator, Config(), tmp_path, buffer)
    monkeypatch.setattr(generator._player, "abandon", lambda: abandoned.append(True))
    with pytest.raises(RunFailed, match="refuses work"):
        await generator.run()
    assert len(abandoned) == 1
    for part in ("_reporter", "_engine"):
        monkeypatch.setattr(generator, part, SimpleNamespace(stop=lambda: None))
    for resumable in (False, True):  # a run that was stopped may go on, and the work of its agents with it
        await generator.stop(resumable)
        assert len(abandoned) == 1 + resumable


async def test_a_gateway_that_cannot_listen_ends_and_a_buffer_that_is_lost_ends_no_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes, gateways = list[int](), actors.generator.gateway
    monkeypatch.setattr(gateways, "EXIT_SECONDS", 0.0)
    monkeypatch.setattr(gateways.os, "_exit", codes.append)
    buffer = SimpleNamespace(continues=answering(died()))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = gateways.GatewayActor(AgentsConfig().model_dump_json(), RunSecret(b"s"), port, buffer)  # type: ignore[arg-type]
        await until(lambda: bool(codes))
    assert await gateway._continues(TrajectoryId(1, 0))
    await gateway._gateway.stop()


async def test_a_generator_that_has_started_watches_its_event_loop(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def joined(self: Generator) -> Any:
        return SimpleNamespace()

    async def started(*_: Any) -> Any:
        return {}

    monkeypatch.setattr(Generator, "_join", joined)
    monkeypatch.setattr(generator._engine, "start", started)
    monkeypatch.setattr(generator._reporter, "start", lambda: None)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(actors.generator.actor.ray, "get_runtime_context", lambda: context)
    before = {thread for thread in threading.enumerate() if thread.name == WATCH}
    await generator.start()
    assert {thread for thread in threading.enumerate() if thread.name == WATCH} - before
