"""Who plays in a chaos run: the real buffer actor on a deadly disk, and light generators and a light trainer.

Generators use the real `Outbox` and `Claimer`; the trainer uses the real `Checkpointer`. What they generate is a
function of (group_id, sample), so that whatever is lost, doubled or mixed up on the way can be seen at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import ray.exceptions
import xxhash

import actors.buffer.actor
import service.run.checkpoints
from actors.buffer.actor import BufferActor, LeasedBatch
from actors.calls import call
from actors.driver.checkpointer import Checkpointer
from actors.generator.claimer import Claimer
from actors.generator.outbox import Outbox, Unreachable
from actors.observe.actor_logs import keep_log
from actors.scorers.workers import asking
from service.columns import digest
from service.config import Config
from service.config.core_settings import message_limits
from service.files import partial_file, write_atomic
from service.handoff.journal.journal import Journal
from service.handoff.ledger.events import USED
from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.state import State
from service.handoff.steps.wire import decode, decode_mini_batch
from service.handoff.verbs import Assignment, Receipt, WaitReason
from service.scorers.user import Trajectory
from service.types import (
    Extension,
    Int32s,
    MiniBatch,
    PolicyVersion,
    Refusal,
    Step,
    StepGroup,
    TrajectoryEnd,
    TrajectoryId,
)
from tests.chaos.doom import Doom, DoomedDisk
from tests.invariant import fingerprint, violations

if TYPE_CHECKING:
    from actors.driver.cluster import Cluster

VOCABULARY = 1000
DEADLINE = 120.0
"""Seconds without any answer of the buffer after which a generator gives up."""
LOOK_SECONDS = 0.01
JUDGE = "scorer-judge-0"
"""The name of the judge's actor."""
JUDGE_SECONDS = 0.02
POLL_SECONDS = 1.0


# -- what is generated ------------------------------------------------------------------------------------------------


def responses(group_id: int, sample: int, turns: int) -> list[Int32s]:
    """The sampled tokens of each turn: always the same for the same trajectory, whoever plays it how often."""
    rng = np.random.default_rng((group_id, sample))
    return [rng.integers(1, VOCABULARY, 1 + int(rng.integers(8)), dtype=np.int32) for _ in range(turns)]


def history(group_id: int, sample: int, turns: int) -> Int32s:
    """The whole row of the trajectory: a prompt token before each turn's response."""
    parts: list[Int32s] = []
    for turn, response in enumerate(responses(group_id, sample, turns)):
        parts += [np.array([turn], np.int32), response]
    return np.concatenate(parts)


def reward(group_id: int, sample: int) -> float:
    return float((group_id + sample) % 2)


def played(of: TrajectoryId, uid: str, turn: int, turns: int, version: PolicyVersion) -> Step:
    """One turn as a step that extends the turns before."""
    response = responses(of.group_id, of.sample, turns)[turn]
    before = history(of.group_id, of.sample, turns)[: sum(1 + len(r) for r in responses(*of[:2], turns)[:turn])]
    return Step(
        trajectory=of,
        prompt_uid=uid,
        index=turn,
        prompt_ids=np.array([turn], np.int32),
        response_ids=response,
        logprobs=np.full(len(response), -0.5, np.float32),
        loss_mask=np.ones(len(response), np.bool_),
        versions=np.full(len(response), version.pack(), np.int64),
        reward=reward(of.group_id, of.sample) if turn == turns - 1 else 0.0,
        extends=Extension(turn - 1, len(before), digest(before)) if turn else None,
    )


# -- files that everybody shares --------------------------------------------------------------------------------------


def break_promise(folder: Path, what: str) -> None:
    with (folder / "broken.txt").open("a") as file:
        file.write(what + "\n")


def came_up(folder: Path, role: str) -> None:
    """Say who plays a role now, for those who kill it, and when it came."""
    (folder / "pids").mkdir(exist_ok=True)
    write_atomic(folder / "pids" / role, str(os.getpid()))
    with (folder / f"up-{role}.txt").open("a") as file:
        file.write(f"{time.time()}\n")


def published(folder: Path) -> PolicyVersion:
    """What the engines serve."""
    file = folder / "weights.json"
    return PolicyVersion(*json.loads(file.read_text())) if file.exists() else PolicyVersion(0, 0)


def acknowledged(folder: Path) -> set[tuple[int, int, int, int]]:
    """(group_id, sample, attempt, step index) of everything that generators read a receipt for."""
    lines = [line for file in folder.glob("acks-*.txt") for line in file.read_text().splitlines()]
    return {tuple(map(int, line.split())) for line in lines}  # type: ignore[misc]


def noted_scores(folder: Path) -> dict[int, list[float]]:
    """The judge's rewards of each group, as they were when they came to the buffer's disk."""
    file = folder / "scores.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    return {int(group_id): json.loads(rewards) for group_id, _, rewards in (line.partition(" ") for line in lines)}


# -- a scorer ---------------------------------------------------------------------------------------------------------


class Judge:
    """What it says about a group is something else each time."""

    def __init__(self, folder: str) -> None:
        came_up(Path(folder), JUDGE)

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """A random reward for each trajectory."""
        time.sleep(JUDGE_SECONDS)
        return [random.random() for _ in trajectories]


# -- the buffer -------------------------------------------------------------------------------------------------------


class DoomedBuffer(BufferActor):
    """The real buffer actor; its journal lies on a disk on which it may die, and every start is checked."""

    def __init__(self, config_json: str, folder: str, journal: str, segment_bytes: int, hub: Any) -> None:
        self._folder = Path(folder)
        self._doom = Doom(self._folder / "doom" / "buffer.json")
        disk = DoomedDisk(self._doom)
        actors.buffer.actor.Journal = partial(Journal, disk=disk, segment_bytes=segment_bytes)  # type: ignore[misc]
        self._noted = noted_scores(self._folder)
        super().__init__(config_json, VOCABULARY, str(self._folder / "tasks.jsonl"), journal, hub, asking=asking)
        self._look()
        came_up(self._folder, "buffer")

    def _look(self) -> None:
        """Nothing that was acknowledged is missing, and the ledger is consistent."""
        for what in violations(self._buffer.ledger):
            break_promise(self._folder, f"ledger: {what}")
        for group_id, sample, attempt, index in acknowledged(self._folder):
            if lost(self._buffer.ledger, group_id, sample, attempt, index):
                break_promise(self._folder, f"lost: group={group_id}/sample={sample}/attempt={attempt}/step={index}")

    async def _settled(self) -> None:
        news = self._newly_scored()
        await super()._settled()
        if news:
            with (self._folder / "scores.txt").open("a") as file:
                file.writelines(f"{group_id} {json.dumps(rewards)}\n" for group_id, rewards in news.items())

    def _newly_scored(self) -> dict[int, list[float]]:
        """What the judge said and was not noted yet; something else than what was noted breaks a promise."""
        said = {
            group_id: [*(score.rewards or ())]
            for group_id, group in self._buffer.ledger.state.groups.items()
            if group.scored
            for score in self._buffer.scoring.answers(group_id)
        }
        for group_id, rewards in said.items():
            if self._noted.get(group_id, rewards) != rewards:
                break_promise(self._folder, f"scored twice: group={group_id}, {self._noted[group_id]} and {rewards}")
        news = {group_id: rewards for group_id, rewards in said.items() if group_id not in self._noted}
        self._noted |= news
        return news

    async def claim(self, *arguments: Any) -> Any:
        answer = await super().claim(*arguments)
        if isinstance(answer, list):
            self._doom.at("claim.after")
        return answer

    async def submit(self, data: bytes) -> Any:
        self._doom.at("submit.before")
        answer = await super().submit(data)
        self._doom.at("submit.after")
        return answer

    async def lease(self, *arguments: Any) -> Any:
        answer = await super().lease(*arguments)
        if isinstance(answer, LeasedBatch):
            self._doom.at("lease.after")
        return answer

    async def commit(self, *arguments: Any) -> Any:
        self._doom.at("commit.before")
        answer = await super().commit(*arguments)
        self._doom.at("commit.after")
        return answer

    async def covered(self, *arguments: Any) -> Any:
        self._doom.at("covered.before")
        answer = await super().covered(*arguments)
        self._doom.at("covered.after")
        return answer

    async def report(self) -> dict[str, Any]:
        """What the end of the run is judged by."""
        self._look()
        return {"status": self._buffer.status().as_dict(), "digest": comparable_digest(self._buffer.ledger)}


def lost(ledger: Ledger, group_id: int, sample: int, attempt: int, index: int) -> bool:
    """Whether an acknowledged step is neither there, nor was replaced, nor came to its end with its group."""
    group = ledger.state.groups.get(group_id)
    if group is None:
        return group_id >= ledger.state.next_group_id
    if group.state in USED or not group.trajectories:
        return False
    trajectory = group.trajectories[sample]
    return not trajectory.given_up and trajectory.attempt == attempt and index not in trajectory.indices


def comparable_digest(ledger: Ledger) -> str:
    """The ledger's digest without what differs between two runs of the same history: message numbers and positions."""
    ours = Ledger(msgspec.msgpack.decode(ledger.snapshot(), type=State))
    ours.state.generators.clear()
    for group in ours.state.groups.values():
        group.first_position = None
    return fingerprint(ours)


class AnsweringEarly(DoomedBuffer):
    """A buffer with a bug, to see that the bug is found: it acknowledges what is not on the disk yet."""

    _sync_seconds = 0.3

    async def _settled(self) -> None:
        self._queued.set()


class Scraper:
    """In the place of the metrics hub: checks at every scrape that the token ledger closes, and notes who waits."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def push(
        self, source: str, snapshot: bytes, reports: Sequence[tuple[str, dict[str, Any]]] = (), timeline: bytes = b""
    ) -> None:
        for _, report in reports:
            self._look(report)

    def _look(self, report: dict[str, Any]) -> None:
        if report["accepted_tokens"] != sum(report["tokens"].values()):
            break_promise(self._folder, f"the token ledger does not close: {report['tokens']}")
        with (self._folder / "waits.txt").open("a") as file:
            file.writelines(f"{wait['who']} {wait['reason']}\n" for wait in report["waits"])
        with (self._folder / "scrapes.txt").open("a") as file:
            file.write(f"{report['accepted_tokens']}\n")


# -- a generator ------------------------------------------------------------------------------------------------------


class Player:
    """Plays one part at a time: whoever is called again, because the first call's answer was lost, begins anew."""

    _running: asyncio.Task[Any] | None = None

    async def run(self) -> Any:
        """Play to the end."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        self._running = asyncio.ensure_future(self._play_part())
        return await self._running

    async def _play_part(self) -> Any:
        raise NotImplementedError


class FakeGenerator(Player):
    """Claims groups and sends their turns; without an engine."""

    def __init__(self, name: str, config_json: str, folder: str, turn_seconds: float, concurrency: int) -> None:
        keep_log(name)
        self._name, self._folder = name, Path(folder)
        self._config = Config.model_validate_json(config_json)
        self._limits = message_limits(self._config, VOCABULARY)
        self._turn_seconds, self._concurrency = turn_seconds, concurrency
        self._doom = Doom(self._folder / "doom" / f"{name}.json")
        self._acks = (self._folder / f"acks-{name}.txt").open("a")
        self._buffer = ray.get_actor("buffer")
        self._slow: list[float] = []
        came_up(self._folder, name)

    async def _play_part(self) -> list[float]:
        """Generate until the buffer is drained; returns the seconds that each acknowledgement took."""
        incarnation = await self._ask(self._buffer.join, "generator", self._name)
        claimer = Claimer(self._name, incarnation, partial(self._ask, self._buffer.claim), self._serving, DEADLINE)
        outbox = Outbox(self._name, incarnation, self._submit, DEADLINE, lambda group_id: None, lambda trajectory: None)
        free = asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as background:
            helpers = [background.create_task(outbox.run()), background.create_task(self._look(claimer))]
            async with asyncio.TaskGroup() as groups:
                await free.acquire()
                while (assignment := await claimer.next()) is not None:
                    self._doom.at("claim.after")
                    groups.create_task(self._play(outbox, assignment)).add_done_callback(lambda _: free.release())
                    await free.acquire()
            await outbox.flush()
            for helper in helpers:
                helper.cancel()
        return self._slow

    def _serving(self) -> PolicyVersion:
        return published(self._folder)

    async def _look(self, claimer: Claimer) -> None:
        seen = self._serving()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self._serving() != seen:
                seen = self._serving()
                claimer.look_again()

    async def _play(self, outbox: Outbox, assignment: Assignment) -> None:
        turns = self._config.env.max_turns
        for sample, attempt in zip(assignment.samples, assignment.attempts, strict=True):
            of = TrajectoryId(assignment.group_id, sample, attempt)
            for turn in range(turns):
                version = self._serving()
                await asyncio.sleep(self._turn_seconds)
                outbox.append(played(of, assignment.prompt_uid, turn, turns, version))
                self._doom.at("turn.after")
            outbox.end(TrajectoryEnd(of, assignment.prompt_uid, turns, "stop", reward(of.group_id, of.sample)))
            if self._concurrency == 1:
                await outbox.flush()

    async def _submit(self, data: bytes) -> Receipt | Refusal:
        self._doom.at("submit.before")
        began = time.monotonic()
        answer: Receipt | Refusal = await self._ask(self._buffer.submit, data)
        self._slow.append(time.monotonic() - began)
        if isinstance(answer, Refusal):
            return answer
        self._doom.at("submit.after")
        message = decode(data, self._limits)
        assert isinstance(message, StepGroup)
        steps = message.steps
        columns = (steps.group_id_K, steps.sample_K, steps.attempt_K, steps.index_K)
        for identity in zip(*(column.tolist() for column in columns), strict=True):
            if TrajectoryId(*identity[:3]) not in answer.late:
                self._acks.write(" ".join(map(str, identity)) + "\n")
        self._acks.flush()
        return answer

    async def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return await method.remote(*arguments)
        except ray.exceptions.RayActorError as error:
            raise Unreachable(str(error)) from error


# -- the trainer ------------------------------------------------------------------------------------------------------


class FakeTrainer(Player):
    """Leases, checks what it got, commits and checkpoints; its weights are the fingerprint of what it trained."""

    def __init__(self, config_json: str, folder: str, step_seconds: float) -> None:
        keep_log("trainer")
        self._config, self._folder = Config.model_validate_json(config_json), Path(folder)
        self._step_seconds = step_seconds
        self._doom = Doom(self._folder / "doom" / "trainer.json")
        self._buffer = ray.get_actor("buffer")
        buffer = SimpleNamespace(status=self._buffer.status, covered=self._covered)
        cluster = cast("Cluster", SimpleNamespace(buffer=buffer, trainer=self))
        self._checkpointer = Checkpointer(self._config, self._folder, cluster)
        self._history: list[dict[str, Any]] = []
        service.run.checkpoints.write_atomic = self._write_manifest
        came_up(self._folder, "trainer")

    async def _play_part(self) -> list[dict[str, Any]]:
        """Train from the newest checkpoint to the end; returns the committed history."""
        manifest = self._checkpointer.newest()
        step = 0 if manifest is None else manifest.step
        self._history = []
        await self._checkpointer.abandon()
        if manifest is not None:
            self._history = json.loads((self._checkpointer.path(step) / "history.json").read_text())
        incarnation = await call(self._buffer.join, "trainer", "trainer", step, who="the buffer")
        version = PolicyVersion(incarnation, step)
        self._publish(version)
        async for leased in self._leases(incarnation, version.step):
            entry = self._checked(leased)
            self._doom.at("lease.after")
            await asyncio.sleep(self._step_seconds)
            self._doom.at("commit.before")
            version = PolicyVersion(incarnation, version.step + 1)
            refused = await call(self._buffer.commit, incarnation, leased.lease, version, who="the buffer")
            if refused is not None:
                raise Unreachable(f"the step was refused: {refused}")
            self._doom.at("commit.after")
            self._history.append(entry)
            if version.step % self._config.trainer.checkpoint_every == 0:
                await self._checkpoint(version)
            self._publish(version)
        await self._checkpoint(version)
        await call(self._buffer.end, who="the buffer")
        return self._history

    async def _leases(self, incarnation: int, step: int) -> AsyncIterator[LeasedBatch]:
        while step < self._config.run.max_steps and not (self._folder / "stop").exists():
            answer = await call(self._buffer.lease, incarnation, POLL_SECONDS, who="the buffer")
            if isinstance(answer, Refusal):
                raise Unreachable(f"the lease was refused: {answer}")
            if isinstance(answer, LeasedBatch):
                yield answer
                step += 1
            elif answer.reason is WaitReason.DRAINED:
                return

    def _checked(self, leased: LeasedBatch) -> dict[str, Any]:
        """The mini-batch as an entry of the history; what should not be in it breaks a promise."""
        batch = decode_mini_batch(leased.parts[0])
        again = {group_id for entry in self._history for group_id in entry["groups"]} & set(batch.groups)
        if again:
            break_promise(self._folder, f"trained twice: {sorted(again)} of {batch.groups}")
        for what in wrong_rows(batch, self._config.env.max_turns):
            break_promise(self._folder, what)
        noted = noted_scores(self._folder) if self._config.scorers else {}
        for place, group_id in enumerate(batch.groups if self._config.scorers else ()):
            used = batch.return_G[batch.prompt_of_trajectory_G == place].tolist()
            if used != noted.get(group_id):
                break_promise(self._folder, f"another score: group={group_id}, {used} and not {noted.get(group_id)}")
        chain = xxhash.xxh3_64((self._history[-1]["chain"] if self._history else "").encode())
        for micro_batch in batch.ranks[0]:
            chain.update(micro_batch.token_ids_N.tobytes() + micro_batch.loss_mask_N.tobytes())
        chain.update(batch.advantage_G.tobytes())
        if batch.turn_advantage_X is not None:
            chain.update(batch.turn_advantage_X.tobytes())
            for micro_batch in batch.ranks[0]:
                chain.update(b"" if micro_batch.turn_N is None else micro_batch.turn_N.tobytes())
        return {"step": len(self._history) + 1, "groups": list(batch.groups), "chain": chain.hexdigest()}

    def _publish(self, version: PolicyVersion) -> None:
        # The last weights would admit work that has begun or not, as it happens, when the run's end expires it.
        if version.step < self._config.run.max_steps:
            write_atomic(self._folder / "weights.json", json.dumps(version))

    # -- checkpoints, by the calls that the checkpointer makes ---------------------------------------------------------

    async def _checkpoint(self, version: PolicyVersion) -> None:
        await self._checkpointer.begin(version.step)
        await self._checkpointer.settle()

    async def save(self, folder: Path) -> None:
        folder.mkdir()
        text = json.dumps(self._history)
        if self._doom.is_now("checkpoint.half_files"):
            (folder / "history.json").write_text(text[: len(text) // 2])
            self._doom.die()
        (folder / "history.json").write_text(text)

    async def finish_save(self) -> None:
        self._doom.at("manifest.before")

    def _write_manifest(self, path: Path, text: str) -> None:
        if self._doom.is_now("manifest.half"):
            partial_file(path).write_text(text[: len(text) // 2])
            self._doom.die()
        write_atomic(path, text)
        self._doom.at("manifest.after")

    @property
    def _covered(self) -> Any:
        async def covered(step: int, oldest_kept: int) -> None:
            await self._buffer.covered.remote(step, oldest_kept)
            self._doom.at("covered.after")

        return SimpleNamespace(remote=covered)


def wrong_rows(batch: MiniBatch, turns: int) -> list[str]:
    """What is not as it was generated: each trajectory is one row with all its tokens, each with its loss once."""
    found = []
    rows: dict[int, Int32s] = {}
    for micro_batch in batch.ranks[0]:
        for row, trajectory in enumerate(micro_batch.trajectory_of_row_R.tolist()):
            start, stop = micro_batch.offsets_R[row], micro_batch.offsets_R[row + 1]
            if trajectory >= 0 and trajectory in rows:
                found.append(f"trajectory {trajectory} of {batch.groups} has two rows")
            rows[trajectory] = micro_batch.token_ids_N[start:stop]
    per_group = len(batch.advantage_G) // len(batch.groups)
    for trajectory, place in enumerate(batch.prompt_of_trajectory_G.tolist()):
        group_id, sample = batch.groups[place], trajectory % per_group
        if not np.array_equal(rows[trajectory], history(group_id, sample, turns)):
            found.append(f"group={group_id}/sample={sample} is not what was generated")
        if batch.loss_tokens_G[trajectory] != sum(map(len, responses(group_id, sample, turns))):
            found.append(f"group={group_id}/sample={sample} does not carry the loss of its tokens")
    return found
