"""The plan of a configuration: whether the configuration fits into memory, the speed of each split of the GPUs, and the
bottleneck."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path

from service.errors import UserError
from service.handoff.group_bytes import TOKEN_BYTES
from service.learn.estimate.fit import MARGIN
from service.learn.estimate.gpus import GPUS_OF_A_NODE
from service.learn.model.hf_config import read_config
from service.learn.model.router_replay import routing_of_model
from service.plan.binding import Binding, Demand, Part, Side, binding
from service.plan.engine import Engine, Shape
from service.plan.machine.costs import CPU, GPU, TRAINER
from service.plan.machine.device import Device, crowding
from service.plan.settings import PlanSettings
from service.plan.step_seconds import Flow, Setting, mean_before_cut
from service.plan.trainer import estimated
from service.plan.weights import Update, update
from service.plan.work import Work

EVALUATED_ROWS = 512
"""Assumed number of rows of an evaluation set whose size is unknown."""
MAX_SPLITS = 16
"""Maximum number of splits of the GPUs that are compared. If more splits are possible, about this number of evenly
spread splits is compared."""


@dataclass(frozen=True)
class Split:
    """A split of the GPUs into engines and ranks, and the speed of the split."""

    engines: int
    ranks: int
    demand: Demand
    flow: Flow
    rank_bytes: Mapping[str, float]
    fits: bool
    prefilled_tokens: float
    """Tokens per second that all engines together prefill while they have work."""
    sampled_tokens: float
    """Tokens per second that all engines together sample while they have work."""
    trained_tokens: float
    """Tokens per second that all ranks together train while they have work; all tokens of the rows count."""

    @property
    def binding(self) -> Binding:
        """The bottleneck of this split."""
        return binding(self.demand)

    @property
    def step_seconds(self) -> float:
        """Seconds from one optimizer step to the next."""
        return self.flow.step_seconds


def splits_of(settings: PlanSettings, gpus: int) -> Iterator[tuple[int, int]]:
    """Yield each (number of engines, number of ranks) that uses all GPUs.

    Raises:
        UserError: no split uses all GPUs.
    """
    trainer, each = settings.trainer, settings.generator.engine_gpus
    if settings.fit.shares_gpus:
        yield from ((engines, gpus) for engines in _spread(range(1, max(1, gpus // each) + 1)))
        return
    together, groups = trainer.sequence_parallel, "trainer.sequence_parallel"
    node = GPUS_OF_A_NODE if trainer.shard_within == "node" else 1

    def is_possible(ranks: int) -> bool:
        return ranks % together == 0 and (ranks <= node or ranks % node == 0)

    def possible(gpus: int) -> Iterator[int]:
        return (engines for engines in range(1, (gpus - 1) // each + 1) if is_possible(gpus - engines * each))

    found = [*possible(gpus)]
    if not found:
        whole = f", or whole nodes of {node} (trainer.shard_within: node)" if node > 1 else ""
        more = next(number for number in count(gpus + 1) if any(possible(number)))
        raise UserError(
            f"--gpus {gpus}: an engine takes {each} (generator.tensor_parallel_size) and the trainer {together} or a "
            f"multiple of it ({groups}){whole}, which does not use all of them; give {more}"
        )
    yield from ((engines, gpus - engines * each) for engines in _spread(found))


def _spread(numbers: Sequence[int]) -> list[int]:
    """About `MAX_SPLITS` of the numbers, evenly spread, the first and the last among them."""
    return sorted({*numbers[:: -(-len(numbers) // MAX_SPLITS)], numbers[-1]})


class Plan:
    """The plan of a configuration: whether the configuration fits into memory, the seconds of an optimizer step with
    each split of the GPUs, and the bottleneck."""

    def __init__(self, settings: PlanSettings, folder: Path, device: Device, work: Work, gpus: int | None) -> None:
        """Plan for `gpus` GPUs; None: the number in the configuration. `folder`: the model folder, of which only the
        config.json is read.

        Raises:
            UserError: the model cannot be built or run, or there are too few GPUs.
        """
        self.settings, self.device, self.work = settings, device, work
        engines, ranks = settings.generator.max_engines, settings.trainer.ranks
        self.used = ranks if settings.fit.shares_gpus else engines * settings.generator.engine_gpus + ranks
        """Number of GPUs that the configuration's split takes."""
        self.gpus = gpus or self.used
        pairs = {*splits_of(settings, self.gpus)}  # before the estimate, which takes up to a minute
        if self.used == self.gpus:
            pairs.add((engines, ranks))
        self._trainer, self._memory, problem = estimated(settings.fit, folder, device)
        hf_config = read_config(folder)
        self._shape = Shape.of(hf_config, 2.0 if settings.fit.learn.model.dtype == "bfloat16" else 4.0)
        self._on_cpu, pace = device.cores is not None, device.pace
        recorded = settings.generator.record_experts and not self._on_cpu
        self.journal_token_bytes = TOKEN_BYTES + routing_of_model(hf_config, recorded).token_bytes
        token = CPU["token"] + CPU["turn"] / work.response_tokens
        self._engine = Engine(
            self._shape,
            device,
            settings.generator.engine_gpus,
            self._memory.kv or device.memory,
            CPU["iteration"] * pace if self._on_cpu else GPU["iteration"],
            token * pace if self._on_cpu else GPU["request"],
        )
        self._trajectories = settings.trainer.mini_batch_size * settings.samples
        self.journal_bytes = self._trajectories * work.length * self.journal_token_bytes
        """Bytes that the buffer writes to its journal for a mini-batch; a token that several turns share is written
        once."""
        self._cached_iteration = cache(self._iteration_of)

        self.chosen = self.split(engines, ranks)
        """The split of the configuration."""
        self.splits = [self.chosen if pair == (engines, ranks) else self.split(*pair) for pair in sorted(pairs)]
        """All splits of the GPUs; the configuration's split is among them if it uses all GPUs."""
        self.on_policy = self.split(engines, ranks, lookahead=0).flow
        """Waits and speed of the configuration's split if `buffer.lookahead` were 0."""
        transports = ("memory", "ipc") if settings.fit.shares_gpus else ("memory",)
        self.updates = {} if self._on_cpu else {name: self._update(name, engines, ranks) for name in transports}
        """Durations of a weight update, by transport; empty on a CPU, for which no copy rates were measured."""
        self.problem = problem or self._too_large() or self._too_few_gpus(self.used)
        """A text that says why the configuration does not fit into memory, with remedies; None if it fits."""

    @property
    def best(self) -> Split:
        """The fastest split that fits into memory; if no split fits, the fastest of all splits."""
        return min(self.splits, key=lambda split: (not split.fits, split.step_seconds))

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture of experts."""
        return self._shape.experts > 0

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of all optimizer steps of the run with the configuration's split, without the start of the run;
        None on a CPU."""
        seconds = self.settings.max_steps * self.chosen.step_seconds * self.used
        return None if self._on_cpu else seconds / 3600

    @property
    def engine_bytes(self) -> dict[str, float]:
        """Bytes on each GPU of an engine, by what they hold: `weights`, `kv cache`, and the rest."""
        weights = self._shape.parameters * self._shape.width / self.settings.generator.engine_gpus
        parts = {"weights": weights, "kv cache": max(0.0, self._memory.kv)}
        if self._on_cpu:
            return {**parts, "libraries": CPU["engine_bytes"]}
        return {**parts, "graphs and buffers": max(0.0, self._memory.engine - weights)}

    def _too_large(self) -> str | None:
        """Why the processes of a CPU machine do not fit its memory, or a rank its GPU; None if they fit."""
        split, room = self.chosen, self.device.memory * (1 - MARGIN)
        needed = rank = sum(split.rank_bytes.values())
        who, helps = "a rank takes", "use more of them, or a smaller model"
        if self._on_cpu:
            needed = split.ranks * rank + split.engines * sum(self.engine_bytes.values())
            who = f"{split.ranks} ranks and {split.engines} engines on this machine take"
            helps = "use fewer of them or a smaller model, or plan for GPUs (--gpu h100)"
        if needed <= room:
            return None
        return f"trainer.ranks: {who} {needed / 1e9:.1f} GB, of which there are {room / 1e9:.1f}; {helps}"

    def _too_few_gpus(self, used: int) -> str | None:
        """A message if the configured engines and ranks need more GPUs than there are; None if they do not."""
        if used <= self.gpus:
            return None
        generator, unit = self.settings.generator, self.device.unit
        return (
            f"generator.engines: {generator.max_engines} engines of {generator.engine_gpus} {unit} and "
            f"{self.settings.trainer.ranks} ranks take {used}, {used - self.gpus} more than --gpus {self.gpus}; lower "
            "one of them, see the best split"
        )

    def split(self, engines: int, ranks: int, lookahead: int | None = None) -> Split:
        """The split into this number of engines and of ranks, with its speed."""
        work, update = self.work, self._update(self.settings.weights.transport, engines, ranks)
        rows = self._trajectories * work.row_tokens(self.settings.merges)
        running = self.settings.generator.concurrent_groups * self.settings.samples / engines
        # seconds of busy engines to sample a mini-batch
        sampling = self._trajectories * work.sampled / engines / running * self._iteration(running)
        factor, training = self._training(engines, ranks, rows, sampling, update)
        trained = sum(training.values())
        pause = update.pause + self._recomputed(running * min(1.0, sampling * factor / trained))
        pause /= self.settings.weights.sync_every
        # pauses are spread over the iterations between them
        paused = factor * (1 + pause / max(sampling * factor, trained))
        writing = self.journal_bytes / TRAINER["disk"]
        held_up = max(1.0, writing / (sampling * paused))  # engines sample no faster than the disk takes steps
        stepping = training[Part.TRAINER] + training[Part.JOURNAL]
        most = float(self.settings.most_turns[1] * self.settings.generator.max_generate_length)
        flow = Setting(
            mini_batch_size=self.settings.trainer.mini_batch_size,
            samples=self.settings.samples,
            lookahead=self.settings.lookahead if lookahead is None else lookahead,
            slots=self.settings.generator.concurrent_groups,
            engines=engines,
            iteration=lambda running: self._iteration(running) * paused * held_up,
            tokens=mean_before_cut(work.sampled, work.sigma, most),
            sigma=work.sigma,
            most_tokens=most,
            environment_seconds=work.turns * work.environment_seconds,
            train_seconds=stepping,
            after_seconds=trained - stepping,
            sync_seconds=update.arrival,
        ).flow()
        demand = self._demand(engines, ranks, flow, training, pause, held_up, update.arrival)
        generation = max(flow.step_seconds * (1 - flow.generators_wait), 1e-9)
        held = self._rank_bytes(ranks, rows)
        return Split(
            engines=engines,
            ranks=ranks,
            demand=demand,
            flow=flow,
            rank_bytes=held,
            fits=sum(held.values()) <= self.device.memory * (1 - MARGIN),
            prefilled_tokens=self._trajectories * (work.length - work.sampled) / generation,
            sampled_tokens=self._trajectories * work.sampled / generation,
            trained_tokens=rows / demand.seconds(Side.TRAINING),
        )

    def _training(
        self, engines: int, ranks: int, rows: float, sampling: float, update: Update
    ) -> tuple[float, dict[Part, float]]:
        """The factor by which training slows generation down, and the seconds per optimizer step of each part of
        training."""
        work, settings, pace = self.work, self.settings, self.device.pace
        row = work.length if settings.merges else work.prompt_tokens + work.response_tokens
        compute = self._trainer.seconds(self.device, ranks, rows, row, settings.trainer.max_tokens_per_micro_batch)
        handoff = CPU["forming_turn"] * self._trajectories * work.turns * pace
        share = min(1.0, compute / max(compute + handoff, sampling))
        generation_factor, factor = crowding(self.device, engines, ranks, share, settings.fit.shares_gpus)
        after = CPU["after_step"] * pace if self._on_cpu else 0.0
        every, written = settings.trainer.checkpoint_every, self._trainer.step.trained * TRAINER["checkpoint_bytes"]
        return generation_factor, {
            Part.TRAINER: compute * factor,
            Part.WEIGHTS: update.trainer / settings.weights.sync_every + after * factor,
            Part.JOURNAL: handoff * factor,
            Part.EVALUATION: self._evaluation(sampling),
            Part.CHECKPOINT: written / TRAINER["disk"] / every if every else 0.0,
        }

    def _demand(
        self,
        engines: int,
        ranks: int,
        flow: Flow,
        training: Mapping[Part, float],
        pause: float,
        held_up: float,
        arrival: float,
    ) -> Demand:
        work, settings = self.work, self.settings
        generation = flow.step_seconds * (1 - flow.generators_wait)
        pause *= 1 - flow.generators_wait  # slots without a group have nothing to pause
        outside = work.turns * work.environment_seconds
        inside = work.sampled * self._iteration(max(1.0, flow.running))
        waiting = generation * outside / (outside + inside)
        playing = max(0.0, generation - waiting - pause)
        engine = playing / held_up
        return Demand(
            generation={
                Part.ENGINES: engine,
                Part.ENVIRONMENT: waiting,
                Part.WEIGHTS: pause,
                Part.JOURNAL: playing - engine,
            },
            training=training,
            engines=engines,
            ranks=ranks,
            lookahead=settings.lookahead,
            concurrency=settings.generator.concurrent_groups / settings.trainer.mini_batch_size,
            shares_cores=self._on_cpu,
            arrival=arrival,
            seconds_of_step=flow.step_seconds,
        )

    def _rank_bytes(self, ranks: int, rows: float) -> dict[str, float]:
        held = self._trainer.memory(ranks)
        if not self._on_cpu:
            return {**held, "engine": self._memory.shared} if self._memory.shared else held
        full = min(1.0, rows / ranks / self._trainer.micro_tokens)
        return {"libraries": CPU["rank_bytes"], **held, "activations": held.get("activations", 0.0) * full}

    def _iteration(self, running: float) -> float:
        """Seconds of an iteration of an engine with `running` requests."""
        return self._cached_iteration(max(1, round(running)))

    def _iteration_of(self, running: int) -> float:
        work, at_once = self.work, min(float(running), self._engine.most_running(self.work.length))
        computed = (work.length - work.sampled) / work.sampled  # tokens of prompts and observations per sampled token
        seconds = self._engine.iteration(at_once, work.mean_context, computed * at_once)
        return seconds * running / at_once  # the other requests wait for room in the KV cache

    def _recomputed(self, running: float) -> float:
        """Seconds for which an engine recomputes the KV caches of its running requests after an update."""
        if self.settings.weights.kv_cache == "keep" or self._on_cpu:
            return 0.0
        context = self.work.mean_context
        at_once = min(running, self._engine.most_running(self.work.length))
        return self._engine.prefill_seconds(at_once * context, context)

    def _update(self, transport: str, engines: int, ranks: int) -> Update:
        """Seconds of an update of the engines by a transport."""
        gpus, trainer = self.settings.generator.engine_gpus, self.settings.trainer
        nodes = -(-(engines * gpus + ranks) // GPUS_OF_A_NODE)
        lora = self.settings.fit.learn.model.lora  # only the adapter is sent
        sent = self._shape.parameters if lora is None else self._shape.adapter_parameters(lora.rank)
        # with copies of the model on several nodes, the ranks of one copy send
        senders = ranks if trainer.shard_within == "all" else min(ranks, GPUS_OF_A_NODE)
        return update(transport, sent * self._shape.width, self.device, nodes, senders, gpus)

    def _evaluation(self, sampling: float) -> float:
        """Seconds per optimizer step for which evaluations pause training."""
        data = self.settings.data
        if not data.eval_every:
            return 0.0
        rows = data.eval_make_rows or data.eval_rows or EVALUATED_ROWS
        return sampling * rows * data.eval_samples / self._trajectories / data.eval_every
