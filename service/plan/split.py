"""How fast a number of engines and of ranks is: the parts of a plan that depend on the split of the GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from service.config import Config
from service.learn.estimate.fit import MARGIN
from service.learn.estimate.step import GPUS_OF_A_NODE
from service.learn.model.hf_config import read_config
from service.plan.binding import Binding, Demand, Part, Side, binding
from service.plan.engine import GPU_ITERATION, GPU_REQUEST, Engine
from service.plan.flow import Flow, Setting, played
from service.plan.machine.device import Device
from service.plan.machine.host import (
    AFTER_STEP,
    ENGINE_ITERATION,
    ENGINE_TOKEN,
    ENGINE_TURN,
    FORMING_TURN,
    RANK_BYTES,
    crowding,
)
from service.plan.shape import Shape
from service.plan.trainer import Memory, Trainer, estimated
from service.plan.weights import Update, update
from service.plan.work import Work

CHECKPOINT_BYTES, DISK = 12, 1e9
"""Bytes of a parameter in a checkpoint, and bytes/s of the disk that all ranks share; the latter is assumed."""

EVALUATED_ROWS = 512
"""Rows of an evaluation set whose size nothing says; assumed."""


@dataclass(frozen=True)
class Split:
    """A number of engines and of ranks, and how fast they are."""

    engines: int
    ranks: int
    demand: Demand
    flow: Flow
    rank_bytes: Mapping[str, float]
    fits: bool
    prefilled_tokens: float
    """Tokens of an engine's second that are computed, not sampled."""
    sampled_tokens: float
    """Sampled tokens of a second, of all engines while they have work."""
    trained_tokens: float
    """Tokens of the rows of a second, of all ranks while they have work."""

    @property
    def binding(self) -> Binding:
        """What binds."""
        return binding(self.demand)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.flow.step_seconds


class Planner:
    """Everything about a configuration that does not depend on the split."""

    def __init__(self, config: Config, folder: Path, device: Device, work: Work) -> None:
        """`folder` needs a config.json only.

        Raises:
            UserError: the model cannot be made or run.
        """
        self.config, self.device, self.work = config, device, work
        self.trainer: Trainer
        self.memory: Memory
        self.trainer, self.memory, self.problem = estimated(config, folder, device)
        self.shape = Shape.of(read_config(folder), 2.0 if config.model.dtype == "bfloat16" else 4.0)
        self.trajectories = config.trainer.mini_batch_size * config.algorithm.n_samples_per_prompt

    def split(self, engines: int, ranks: int, lookahead: int | None = None) -> Split:
        """How fast so many engines and ranks are."""
        config, device, work = self.config, self.device, self.work
        update = self.update(config.weights.transport, engines, ranks)
        every = config.weights.sync_every
        rows = self.trajectories * work.row_tokens(config.merge_mode != "off")
        row = work.length if config.merge_mode != "off" else work.prompt_tokens + work.response_tokens
        budget = config.trainer.max_tokens_per_micro_batch
        compute = self.trainer.seconds(device, ranks, rows, row, budget)
        turns = self.trajectories * work.turns
        handoff = FORMING_TURN * turns * device.pace
        of_engines = self.generation_seconds(engines)
        share = min(1.0, compute / max(compute + handoff, of_engines))
        shared = config.weights.transport == "ipc"
        generation_factor, training_factor = crowding(device, engines, ranks, share, shared)
        after = AFTER_STEP * device.pace if device.cores is not None else 0.0
        training = {
            Part.TRAINER: compute * training_factor,
            Part.WEIGHTS: update.trainer / every + after * training_factor,
            Part.JOURNAL: handoff * training_factor,
            Part.EVALUATION: self._evaluation(of_engines),
            Part.CHECKPOINT: self._checkpoint(),
        }
        busy = min(1.0, of_engines * generation_factor / sum(training.values()))
        pause = (update.pause + self._recomputed(engines, busy)) / every
        flow = played(self._setting(engines, lookahead, generation_factor, pause, training, update.arrival))
        return self._joined(engines, ranks, flow, training, pause, rows, update)

    def _joined(
        self,
        engines: int,
        ranks: int,
        flow: Flow,
        training: Mapping[Part, float],
        pause: float,
        rows: float,
        update: Update,
    ) -> Split:
        config, work = self.config, self.work
        generation = flow.step_seconds * (1 - flow.generators_wait)
        pause *= 1 - flow.generators_wait  # the other slots have nothing to pause
        outside = work.turns * work.environment_seconds
        inside = work.sampled * self._iteration()(max(1.0, flow.running))
        waiting = generation * outside / (outside + inside)
        demand = Demand(
            generation={
                Part.ENGINES: max(0.0, generation - waiting - pause),
                Part.ENVIRONMENT: waiting,
                Part.WEIGHTS: pause,
            },
            training=training,
            engines=engines,
            ranks=ranks,
            lookahead=self.lookahead,
            concurrency=config.generator.concurrent_groups / config.trainer.mini_batch_size,
            seconds_of_step=flow.step_seconds,
        )
        held = self.trainer.memory(ranks)
        if self.device.cores is not None:
            full = min(1.0, rows / ranks / self.trainer.micro_tokens)
            held = {"libraries": RANK_BYTES, **held, "activations": held.get("activations", 0.0) * full}
        computed = self.trajectories * (work.length - work.sampled)
        return Split(
            engines=engines,
            ranks=ranks,
            demand=demand,
            flow=flow,
            rank_bytes=held,
            fits=self._fits(held),
            prefilled_tokens=computed / max(generation, 1e-9),
            sampled_tokens=self.trajectories * work.sampled / max(generation, 1e-9),
            trained_tokens=rows / demand.seconds(Side.TRAINING),
        )

    @property
    def lookahead(self) -> int:
        """`buffer.lookahead`; where that is auto, what keeps the trainer's waiting short for moderate tails."""
        setting = self.config.buffer.lookahead
        return min(4, self.config.buffer.max_staleness) if setting == "auto" else int(setting)

    def engine(self) -> Engine:
        """An engine of the configuration."""
        config, pace = self.config, self.device.pace
        on_cpu = self.device.cores is not None
        token = ENGINE_TOKEN + ENGINE_TURN / self.work.response_tokens
        return Engine(
            self.shape,
            self.device,
            config.generator.tensor_parallel_size,
            self.memory.kv or self.device.memory,
            ENGINE_ITERATION * pace if on_cpu else GPU_ITERATION,
            token * pace if on_cpu else GPU_REQUEST,
        )

    def _iteration(self) -> Callable[[float], float]:
        """Seconds of an iteration of an engine, by the requests that run in it."""
        engine, work = self.engine(), self.work
        most = engine.most_running(work.length)
        computed = (work.length - work.sampled) / work.sampled  # prompts and observations, for each sampled token

        known: dict[int, float] = {}

        def seconds(running: float) -> float:
            whole = max(1, round(running))
            if whole not in known:
                at_once = min(float(whole), most)
                iteration = engine.iteration(at_once, work.mean_context, computed * at_once)
                known[whole] = iteration * whole / at_once  # the others wait for room in the KV cache
            return known[whole]

        return seconds

    def generation_seconds(self, engines: int) -> float:
        """Seconds in which busy engines sample a mini-batch."""
        running = self.config.generator.concurrent_groups * self.config.algorithm.n_samples_per_prompt / engines
        return self.trajectories * self.work.sampled / engines / running * self._iteration()(running)

    def _setting(
        self,
        engines: int,
        lookahead: int | None,
        factor: float,
        pause: float,
        training: Mapping[Part, float],
        arrival: float,
    ) -> Setting:
        config, work, iteration = self.config, self.work, self._iteration()
        expected = max(self.generation_seconds(engines) * factor, sum(training.values()))
        stepping = training[Part.TRAINER] + training[Part.JOURNAL]
        paused = factor * (1 + pause / expected)  # pauses are spread over the iterations between them
        return Setting(
            mini_batch_size=config.trainer.mini_batch_size,
            samples=config.algorithm.n_samples_per_prompt,
            lookahead=self.lookahead if lookahead is None else lookahead,
            slots=config.generator.concurrent_groups,
            engines=engines,
            iteration=lambda running: iteration(running) * paused,
            tokens=work.sampled,
            sigma=work.sigma,
            most_tokens=float(config.env.max_turns * config.generator.max_generate_length),
            environment_seconds=work.turns * work.environment_seconds,
            train_seconds=stepping,
            after_seconds=sum(training.values()) - stepping,
            sync_seconds=arrival,
        )

    def _recomputed(self, engines: int, busy: float) -> float:
        """Seconds in which an engine computes the KV caches of its running requests anew after an update.

        `busy`: fraction of the slots that have work.
        """
        if self.config.weights.kv_cache == "keep" or self.device.cores is not None:
            return 0.0
        running = self.config.generator.concurrent_groups * self.config.algorithm.n_samples_per_prompt / engines
        running, engine, context = running * busy, self.engine(), self.work.mean_context
        return engine.prefill_seconds(min(running, engine.most_running(self.work.length)) * context, context)

    def update(self, transport: str, engines: int, ranks: int) -> Update:
        """An update of the engines by a transport."""
        gpus = self.config.generator.tensor_parallel_size
        nodes = -(-(engines * gpus + ranks) // GPUS_OF_A_NODE)
        lora = self.config.model.lora  # of an adapter, only itself is sent
        sent = self.shape.parameters if lora is None else self.shape.adapter_parameters(lora.rank)
        # copies of the model on several nodes: the ranks of one send
        senders = ranks if self.config.trainer.shard_within == "all" else min(ranks, GPUS_OF_A_NODE)
        return update(transport, sent * self.shape.width, self.device, nodes, senders, gpus)

    def _evaluation(self, generation_seconds: float) -> float:
        """Seconds of a step for evaluations, during which training waits; those beside training cost it engines."""
        data = self.config.data
        if not data.eval_every or data.eval_mode == "beside":
            return 0.0
        rows = data.eval_make_rows or data.eval_rows or EVALUATED_ROWS
        return generation_seconds * rows * data.eval_samples / self.trajectories / data.eval_every

    def _checkpoint(self) -> float:
        every = self.config.trainer.checkpoint_every
        return self.shape.parameters * CHECKPOINT_BYTES / DISK / every if every else 0.0

    def _fits(self, held: Mapping[str, float]) -> bool:
        return sum(held.values()) <= self.device.memory * (1 - MARGIN)
