"""The parts of a run in virtual time: the production actors around an engine, a learner and a player that are none."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from actors.engine.engine_load import EngineTimes
from actors.engine.vllm_engine import WeightUpdate
from actors.trainer.actor import MeetingPoint, TrainerRank
from actors.weights.image import ImageHolder
from actors.weights.part import Source
from actors.weights.pulled import WeightFile
from service.columns import digest
from service.config import Config
from service.errors import RunFailed
from service.handoff.scoring import Answer
from service.handoff.steps.values import StopReason
from service.handoff.steps.wire import accepted_group
from service.learn.learner import StepReport
from service.learn.model.sharding import WeightRows
from service.observe.metrics import Metrics
from service.rollout.environment import Task
from service.rollout.step_sinks import StepSink
from service.run.folder import write_address
from service.run.liveness.supervisor import Life
from service.scorers.reply import encode_answer
from service.types import Extension, MiniBatch, PolicyVersion, TrajectoryEnd, TrajectoryId
from tests.pure.handoff.worlds import step
from tests.sim.made_ray import MadeActor
from tests.sim.virtual_asyncio import PROCESS

ADDRESS = "http://127.0.0.1:9400"
RANKS, TURNS, TOKENS = 2, 2, 3
ENGINE_SECONDS = 6.0
"""From the start of an engine to its first token."""
ENGINE_CHECKS = 6
"""How often it notices meanwhile that its core has ended."""
TURN_SECONDS = 1.5
WORKER_SECONDS = 3.0
"""After which another agent worker is there, if the one before died."""
CLOSED_SECONDS = 0.5
"""After which a collective fails whose peer died."""
ROWS_OF_RANK = 4


class Collective:
    """What the ranks do together: a call goes on when all ranks made it; it fails when one of them dies."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._there: dict[str, dict[int, asyncio.Future[None]]] = {}

    async def meet(self, rank: int, method: str) -> None:
        """Wait for the other ranks."""
        there = self._there.setdefault(method, {})
        there[rank] = asyncio.get_running_loop().create_future()
        if len(there) == RANKS:
            del self._there[method]
            for waiting in there.values():
                if not waiting.done():
                    waiting.set_result(None)
        mine = there[rank]
        async with asyncio.timeout(self._deadline):
            await mine

    def broken(self, rank: int) -> None:
        """A rank's process has ended."""
        for there in self._there.values():
            there.pop(rank, None)
            for waiting in there.values():
                asyncio.get_running_loop().call_later(CLOSED_SECONDS, self._fail, waiting)

    def _fail(self, waiting: asyncio.Future[None]) -> None:
        if not waiting.done():
            waiting.set_exception(RuntimeError("Connection closed by peer"))


class SimLearner:
    """Learns nothing; its weights are the number of steps."""

    SAVE_BYTES, DISK_RATE = 1.0, 1e9
    """Bytes of a rank's part of a checkpoint, and bytes a second that the disk takes."""

    def __init__(self, rank: int) -> None:
        self._rank, self.steps = rank, 0
        self.writer = SimpleNamespace(progress=self._progress)
        self._save: tuple[float, Path, int] | None = None
        """When the unfinished checkpoint began, its folder and its step."""
        self.policy = SimpleNamespace(dtype=torch.float32, shards=self._shards)

    def step(self, batch: MiniBatch) -> StepReport:
        """Count a step."""
        self.steps += 1
        return StepReport(True, None, {})

    def _shards(self) -> dict[str, WeightRows]:
        rows = torch.full((ROWS_OF_RANK, 2), float(self.steps))
        return {"w": WeightRows((RANKS * ROWS_OF_RANK, 2), self._rank * ROWS_OF_RANK, rows)}

    def save(self, folder: Path, background: bool) -> None:
        """Begin to write the number of steps."""
        assert self._progress() is None, "a checkpoint is begun while the last one is being written"
        self._save = time.monotonic(), folder, self.steps

    def _progress(self) -> int | None:
        """The bytes that are written; at the end there is the file."""
        if self._save is None:
            return None
        began, folder, steps = self._save
        if (n_bytes := (time.monotonic() - began) * self.DISK_RATE) < self.SAVE_BYTES:
            return int(n_bytes)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{self._rank}.json").write_text(json.dumps(steps))
        self._save = None
        return None

    def load(self, folder: Path) -> None:
        """Read the number of steps."""
        self.steps = json.loads((folder / f"rank_{self._rank}.json").read_text())

    def export(self, folder: Path) -> None:
        """Write the final weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank_{self._rank}.json").write_text(json.dumps(self.steps))


class SimRank(TrainerRank):
    """The production rank; its process group is made."""

    TOGETHER = ("load", "step", "save", "restore", "export")

    def __init__(self, config_json: str, rank: int, collective: Collective) -> None:
        super().__init__(config_json, rank)
        self._collective = collective

    async def before(self, method: str) -> None:
        """What takes all ranks."""
        if method in self.TOGETHER and (self._learner is not None or method == "load"):
            await self._collective.meet(self._rank, method)

    def place(self) -> tuple[str, MeetingPoint]:
        return "node", ("127.0.0.1", 1)

    def load(self, meeting_point: MeetingPoint, model_folder: str, *how: Any) -> None:
        self._learner = SimLearner(self._rank)  # type: ignore[assignment]
        self._states.enter("waiting")


class SimEngine:
    """Takes weights from images, and generates what nobody looks at."""

    load = None

    def __init__(self, config: Config, model_folder: Path, number: int) -> None:
        self.serving = PolicyVersion(0, 0)
        self.core_died, self.cached_tokens = False, 0
        self.times = EngineTimes()

    async def start(self, version: PolicyVersion) -> None:
        """Load the model; as the production engine, raises if its core ends meanwhile."""
        for _ in range(ENGINE_CHECKS):
            await asyncio.sleep(ENGINE_SECONDS / ENGINE_CHECKS)
            if self.core_died:
                raise RunFailed("vLLM did not start; its log says why: engine core initialization failed")

    async def check(self, deadline: float) -> None:
        """As the production engine, once its core has ended."""
        if self.core_died:
            raise RunFailed("the engine died: EngineDeadError")

    async def generate(self) -> None:
        """A turn."""
        await asyncio.sleep(TURN_SECONDS)
        if self.core_died:
            await asyncio.get_running_loop().create_future()

    async def update_weights(self, version: PolicyVersion, sources: list[Source], checksum: int) -> WeightUpdate:
        """Pull the rows one after another: all are of this version."""
        if self.core_died:
            raise RunFailed("the engine died: EngineDeadError")
        file = WeightFile(version.pack(), sources)
        tensors = dict(file.tensors())
        rows = []
        for row in tensors["w"]:
            await asyncio.sleep(0.2 / len(tensors["w"]))
            rows.append(row.clone())
        file.check()
        if not (torch.stack(rows) == version.step).all():
            raise ValueError(f"weights of {version} are {rows}")
        self.serving = version
        return WeightUpdate(file.n_bytes, 0.1)

    def measure(self, metrics: Metrics) -> None:
        """Nothing."""

    def stop(self) -> None:
        """Nothing."""


class AgentWorkers:
    """The agents of all trajectories: one process outside of Ray; a turn that it lost is made again by the next."""

    def __init__(self, later: Callable[[float, Callable[[], None]], None]) -> None:
        self._later, self._is_up = later, asyncio.Event()
        self._is_up.set()
        self.lives = 0

    def die(self, seconds: float) -> None:
        """End it; another one is there after so many seconds."""
        self.lives += 1
        self._is_up.clear()
        self._later(seconds, self._is_up.set)

    async def turn(self) -> None:
        """Make a turn."""
        while True:
            await self._is_up.wait()
            life = self.lives
            await asyncio.sleep(0.1)
            if self.lives == life:
                return


class SimPlayer:
    """Plays trajectories of short turns."""

    agents, resumes, last_failure = None, False, ""

    def __init__(
        self, workers: AgentWorkers, config: Config, model_folder: Path, engine: SimEngine, *more: Any
    ) -> None:
        self._workers, self._engine = workers, engine
        self.leaked, self.failures = list[Any](), dict[str, str]()

    async def play(self, of: TrajectoryId, task: Task, sink: StepSink) -> TrajectoryEnd:
        """Play all turns."""
        whole = np.zeros(0, np.int32)
        for turn in range(TURNS):
            version = self._engine.serving.pack()
            await self._engine.generate()
            await self._workers.turn()
            response, given = [of.sample + token for token in range(TOKENS)], reward(of) if turn == TURNS - 1 else 0.0
            made = step(turn, [turn], response, trajectory=of, uid=task.uid, reward=given, version=version)
            extends = Extension(turn - 1, len(whole), digest(whole)) if turn else None
            sink.append(replace(made, extends=extends))
            whole = np.concatenate([whole, made.prompt_ids, made.response_ids])
        end = TrajectoryEnd(of, task.uid, TURNS, StopReason.STOP, reward(of))
        sink.end(end)
        return end

    def load(self) -> None:
        """Nothing."""

    def abandon(self) -> None:
        """Nothing."""

    def measure(self, metrics: Metrics, trace: Any) -> None:
        """Nothing."""

    async def close(self) -> None:
        """Nothing."""


def reward(of: TrajectoryId) -> float:
    """Different within a group."""
    return float((of.group_id + of.sample) % 2)


class Living:
    """An actor without a state."""

    def __init__(self) -> None:
        self._process = uuid4().hex

    async def life(self) -> Life:
        """Which process this is."""
        return Life(self._process, True)


class Judge(Living):
    """A scorer's actor."""

    async def ready(self) -> str:
        """The name of this process."""
        return self._process

    async def reply(self, row: int, group: bytes) -> bytes:
        """A reward for each trajectory."""
        ends = accepted_group(group).ends
        return encode_answer(Answer([float(sample) for sample in range(len(ends))]))


class SimHub(Living):
    """The metrics hub without a port."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    async def start(self) -> str:
        """Its address."""
        write_address(self._folder, ADDRESS)
        return ADDRESS

    async def push(self, *told: Any) -> float:
        """Forget it."""
        return 0.0

    async def forget(self, source: str) -> None:
        """Nothing is kept."""

    async def binding(self) -> None:
        """Nothing is known."""


def free_images(holder: ImageHolder | None) -> None:
    """The memory of a dead process is free."""
    if holder is not None:
        holder._memory.close()


def end_of_this_process(actors: dict[str, MadeActor], code: int) -> None:
    """In the place of `os._exit`."""
    process = PROCESS.get()
    for actor in actors.values():
        if process is not None and actor.process is process:
            actor.die()
