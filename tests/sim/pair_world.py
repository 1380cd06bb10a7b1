"""A whole run in virtual time, in which two things die: the production driver, actors and buffer, without Ray.

coordinator, pool, trainer group, delivery      production, driven by the virtual loop
buffer, ranks, generator                        production actors in made processes; made learner, engine, player
scorer, hub, agent workers                      made
Ray                                             made, see made_ray.py
"""

import asyncio
import gc
import io
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import ray

import actors.buffer.actor
import actors.deaths
import actors.driver.coordinator
import actors.generator.actor
import actors.observe.reporting
import service.run.phases
import service.run.records.writer
from actors.buffer.actor import BufferActor, LeasedBatch
from actors.driver.cluster import Cluster
from actors.driver.coordinator import Coordinator
from actors.driver.host_watch import ClusterHost, HostWatch
from actors.generator.actor import Generator
from actors.scorers.workers import asking
from actors.trainer.group import TrainerGroup
from service.config import Config, load_config
from service.config.core_settings import message_limits
from service.errors import BatonError
from service.handoff.journal.journal import Journal
from service.handoff.steps.tables import trajectory_ids
from service.handoff.steps.values import Routing
from service.handoff.steps.wire import decode, decode_mini_batch
from service.handoff.verbs import Receipt
from service.observe.metrics import Metrics
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.rows import write_rows
from service.run.preparing.inputs import Prepared
from service.run.records.writer import RunWriter
from service.types import MiniBatch, Refusal, StepGroup
from tests.sim.disk import MemoryDisk
from tests.sim.made_parts import (
    RANKS,
    TURNS,
    WORKER_SECONDS,
    AgentWorkers,
    Collective,
    Judge,
    SimEngine,
    SimHub,
    SimPlayer,
    SimRank,
    end_of_this_process,
    free_images,
)
from tests.sim.made_ray import MadeActor, MadeRay
from tests.sim.pairs import CUT_SECONDS, Pair, Told
from tests.sim.scenario import SimulationSettings
from tests.sim.virtual_asyncio import START, VirtualLoop
from tests.sim.witness import Broken, Witness

STEPS = 3
SEGMENT_BYTES = 3000
VOCABULARY = 100
END_SECONDS = 900.0
"""Virtual seconds after which a run counts as hanging; a calm one takes about 20."""
STOP_SECONDS = 60.0

STRIKES: dict[str, tuple[str, str, int, float]] = {
    "start": ("buffer", "ready", 1, 4.0),
    "lease": ("buffer", "lease", 2, 0.3),
    "step": ("trainer-0", "step", 2, 0.3),
    "publication": ("generator-0", "update_weights", 2, 0.1),
    "checkpoint": ("trainer-0", "save_progress", 2, 0.3),
    "end": ("trainer-0", "export", 1, 0.3),
}
"""By moment (actor, method, how many calls of it, seconds after that call)."""


@cache
def pair_config(engines: int = 1) -> Config:
    """The configuration of every world."""
    return load_config(
        [],
        [
            f"run.max_steps={STEPS}",
            "run.trajectories_per_step=0",
            f"trainer.ranks={RANKS}",
            "trainer.checkpoint_every=1",
            "trainer.keep_checkpoints=1",
            "trainer.mini_batch_size=2",
            "trainer.max_tokens_per_micro_batch=1024",
            "algorithm.n_samples_per_prompt=2",
            "algorithm.filter_zero_variance=false",
            f"generator.engines={engines}",
            "generator.concurrent_groups=3",
            "generator.max_input_length=64",
            "generator.max_generate_length=16",
            f"env.max_turns={TURNS}",
            "buffer.lookahead=1",
            "scorers={judge: {use: 'mine:judge', workers: 1, deadline: 10}}",
            "metrics.port=0",
        ],
    )


class NeverBlocked:
    """In place of the watch of an event loop, which lives by the clock of the machine."""

    async def blocked(self, known: int) -> str:
        await asyncio.Event().wait()
        return ""


class PairWorld:
    """One run."""

    def __init__(
        self,
        folder: Path,
        deaths: Sequence[tuple[str, float]] = (),
        moment: str = "start",
        engines: int = 1,
        stops: bool = False,
        last_change: int = 0,
    ) -> None:
        """`deaths`: who dies, and how many seconds after the moment; `stops`: they only stand still for a minute;
        `last_change`: at which change of its disk the buffer dies."""
        self.loop, self.told = VirtualLoop(), Told()
        self.ray = MadeRay(self.loop)
        self.ray.called, self.ray.answered = self._called, self._answered
        self.config = pair_config(engines)
        self.settings = SimulationSettings.of(self.config)
        self.witness = Witness(self.settings)
        self.disk = MemoryDisk()
        self.disk.changes = self._disk_changes
        self.changes, self._last_change = 0, last_change
        self.workers = AgentWorkers(self.ray.later)
        self._folder, self._deaths, self._moment, self._engines = folder, deaths, STRIKES[moment], engines
        self._stops = stops
        self._calls = Counter[tuple[str, str]]()
        self._leased: dict[int, MiniBatch] = {}
        self._json = self.config.model_dump_json()
        self._limits = message_limits(self.config, VOCABULARY)

    def run(self) -> Told:
        """Run to the end, or to a hang."""
        asyncio.set_event_loop(self.loop)
        try:
            with self._patched():
                try:
                    self.loop.run_until_complete(self._run())
                    self.told.seconds = self.loop.now - START
                finally:
                    self.loop.run_until_complete(self._clean_up())
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self.told

    async def _run(self) -> None:
        folder = RunWriter(self._folder / "run")
        tasks_file = self._folder / "tasks.jsonl"
        write_rows(tasks_file, [{"uid": f"p{row}", "prompt": f"prompt {row}"} for row in range(40)])
        prepared = Prepared(tasks_file, load_tasks(tasks_file), self._folder, VOCABULARY, Routing((), 0, 0))
        cluster = self._cluster(tasks_file)
        driver = Coordinator(self.config, cluster, folder, prepared, self._say, None)
        try:
            async with asyncio.timeout(END_SECONDS):
                await driver.run()
            self.told.ended = "finished"
            await self._judge()
        except BatonError as error:
            self.told.ended = f"{type(error).__name__}: {error}"
        except TimeoutError:
            self.told.ended = f"HUNG for {END_SECONDS:.0f} s"
        finally:
            folder.close()

    async def _judge(self) -> None:
        while (actor := self.ray.actors["buffer"]).process is None:
            await asyncio.sleep(1.0)
        buffer = actor.body._buffer
        self._judged(lambda: (self.witness.look(buffer), self.witness.check_the_end(buffer)))
        if buffer.version.step != STEPS:
            self.told.broken.append(f"{buffer.version.step} steps of {STEPS} are committed")

    def _judged(self, look: Callable[[], object]) -> None:
        try:
            look()
        except Broken as broken:
            self.told.broken.append(str(broken))

    # -- who is there -------------------------------------------------------------------------------------------------

    def _cluster(self, tasks_file: Path) -> Cluster:
        files = str(self._folder), str(tasks_file)
        add, collective = self.ray.add, Collective(self.config.trainer.collective_deadline)
        hub = add(MadeActor(self.ray, "metrics-hub", SimHub, partial(SimHub, self._folder / "run"), 2.0), 1.0)
        judge = add(MadeActor(self.ray, "scorer-judge-0", Judge, Judge, 3.0, seconds={"reply": 0.2}), 1.0)
        made = partial(self._new_buffer, files[1])
        buffer = MadeActor(self.ray, "buffer", BufferActor, made, 6.0, retries=True, died=self._power_is_lost)
        of_rank = {"load": 5.0, "step": 1.0, "weights": 0.2, "save": 0.2, "save_progress": 1.0, "export": 1.0}
        of_rank |= {"restore": 1.0, "bucket": 0.05}
        ranks = [
            MadeActor(
                self.ray,
                f"trainer-{rank}",
                SimRank,
                partial(SimRank, self._json, rank, collective),
                4.0,
                is_ordered=True,
                seconds=of_rank,
                died=partial(lambda rank, body: collective.broken(rank), rank),
            )
            for rank in range(RANKS)
        ]
        generators = [
            MadeActor(
                self.ray,
                f"generator-{number}",
                Generator,
                partial(Generator, f"generator-{number}", self._json, *files, "buffer", "metrics-hub"),
                3.0,
                died=free_images,
            )
            for number in range(self._engines)
        ]
        handles = [add(actor, 1.0) for actor in (buffer, *ranks, *generators)]
        trainer = TrainerGroup(self.config, handles[1 : 1 + RANKS])
        return Cluster(hub, handles[0], tuple(handles[1 + RANKS :]), trainer, self._no_room, {"scorer-judge-0": judge})

    def _new_buffer(self, tasks_file: str) -> BufferActor:
        """A process of the buffer, which has all that an earlier one acknowledged."""
        actor = BufferActor(self._json, VOCABULARY, tasks_file, "journal", "metrics-hub", None, asking)
        self._judged(lambda: (self.witness.look(actor._buffer), self.witness.scored(actor._buffer)))
        return actor

    def _power_is_lost(self, buffer: BufferActor) -> None:
        self.disk.lose_power(np.random.default_rng(self.changes))

    def _disk_changes(self) -> None:
        if self.ray.actors["buffer"].body is not None:
            self.changes += 1
            if self.changes == self._last_change:
                self._kill("buffer")
                raise asyncio.CancelledError  # the process is gone here

    async def _no_room(self, number: int) -> Any:
        raise AssertionError("no further generator is asked for")

    def _hosts(self) -> dict[str, ClusterHost]:
        alive = [actor for actor in self.ray.actors.values() if actor.process is not None]
        return {"node": ClusterHost("10.0.0.1", ("driver", *sorted(actor.name for actor in alive)))}

    # -- what happens -------------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        self.told.said.append((self.loop.now - START, line))

    def _called(self, actor: str, method: str) -> None:
        self._calls[actor, method] += 1
        name, of, count, seconds = self._moment
        if (actor, method) == (name, of) and self._calls[actor, method] == count:
            for victim, delay in self._deaths:
                self.ray.later(seconds + delay, partial(self._strike, victim))

    def _strike(self, victim: str) -> None:
        of = "generator-0" if victim == "engine" else victim
        if of in self.ray.actors:
            self.ray.actors[of].strike(partial(self._kill, victim))
        else:
            self._kill(victim)

    def _kill(self, victim: str) -> None:
        if victim in self.ray.actors and self.ray.actors[victim].process is None:
            return  # something else was quicker
        self.told.deaths.append((self.loop.now - START, victim))
        if victim == "connection":
            self.ray.cut(CUT_SECONDS)
        elif victim == "agent worker":
            self.workers.die(STOP_SECONDS if self._stops else WORKER_SECONDS)
        elif victim == "engine":
            if (generator := self.ray.actors["generator-0"].body) is not None:
                generator._engine.core_died = True
        elif self._stops:
            self.ray.actors[victim].stand_still(STOP_SECONDS)
        else:
            self.ray.actors[victim].die()

    def _answered(self, actor: str, method: str, arguments: tuple[Any, ...], results: Any) -> None:
        if actor != "buffer" or results is None:
            return
        self._judged(lambda: self._witnessed(method, arguments, results[0]))

    def _witnessed(self, method: str, arguments: tuple[Any, ...], answer: Any) -> None:
        if method == "lease" and isinstance(answer, LeasedBatch):
            batch = self._leased[answer.lease] = decode_mini_batch(answer.parts[0].data)
            self.witness.scored(self.ray.actors["buffer"].body._buffer)
            self.witness.leased(batch, 0.0)
        elif method == "commit" and answer is None:
            self.told.progress.append(self.loop.now - START)
            self.witness.committed(arguments[2], self._leased[arguments[1]], self.loop.now)
        elif method == "join" and arguments[0] == "trainer":
            self.witness.went_back(arguments[2])
        elif method == "submit" and isinstance(answer, Refusal):
            self.witness.refused(answer)
        elif method == "submit" and isinstance(answer, Receipt):
            message = decode(arguments[0], self._limits)
            assert isinstance(message, StepGroup)
            for of, index in zip(trajectory_ids(message.steps), message.steps.index_K.tolist(), strict=True):
                if of not in answer.late:
                    self.witness.acknowledged(of, index)

    # -- in the place of the world --------------------------------------------------------------------------------

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Time, Ray, the disk and what no promise depends on, such as drawings."""
        runtime = SimpleNamespace(get_node_id=lambda: "node", get_job_id=lambda: "")
        exits = partial(end_of_this_process, self.ray.actors)
        journal = partial(Journal, disk=self.disk, segment_bytes=SEGMENT_BYTES)
        watch = partial(HostWatch, look=self._hosts)
        pieces: list[tuple[Any, str, Any]] = [
            (time, "monotonic", self.loop.time),
            (ray, "get_actor", self.ray.get_actor),
            (ray, "kill", self.ray.kill),
            (ray, "put", lambda value: value),
            (ray, "get_runtime_context", lambda: runtime),
            (os, "_exit", exits),
            (os, "fsync", lambda file: None),
            (gc, "freeze", lambda: None),
            (gc, "collect", lambda *generation: 0),
            (sys, "setswitchinterval", lambda seconds: None),
            (service.run.phases, "threading", SimpleNamespace(Event=Mock, Thread=Mock)),
            (service.run.records.writer, "open_trackers", lambda *told: []),
            (RunWriter, "plot", lambda writer: None),
            (actors.driver.coordinator, "HostWatch", watch),
            (actors.driver.coordinator, "cause_of_death", self.ray.cause_of_death),
            (actors.deaths, "_restarts", self.ray.restarts),
            (actors.deaths.kernel_kills, "look", lambda: None),
            (actors.buffer.actor, "Journal", journal),
            (actors.buffer.actor, "lock_journal", lambda folder, seconds: io.StringIO()),
            (actors.generator.actor, "LoopWatch", NeverBlocked),
            (actors.generator.actor, "VllmEngine", SimEngine),
            (actors.generator.actor, "RunPlayer", partial(SimPlayer, self.workers)),
            (actors.generator.actor, "enter_user_folder", lambda: None),
            (actors.observe.reporting, "PUSH_SECONDS", 30.0),
            (actors.observe.reporting, "measure_process", lambda metrics: None),
            (Metrics, "snapshot", lambda metrics: b""),
        ]
        with ExitStack() as stack:
            for where, name, value in pieces:
                stack.enter_context(patch.object(where, name, value))
            yield

    async def _clean_up(self) -> None:
        for actor in self.ray.actors.values():
            actor.die(restarts=False)
        while left := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def run_pair(pair: Pair, folder: Path, engines: int = 1) -> Told:
    """Run the world of a pair."""
    return PairWorld(folder, [(pair.first, 0.0), (pair.second, pair.delay)], pair.moment, engines).run()
