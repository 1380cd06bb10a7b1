"""The seconds of an optimizer step for each split of the GPUs into engines and ranks, as a range.

    training   FLOPs of the rows, at 30 to 50 % of the GPU's peak rate
    decoding   an iteration reads the weights and the KV caches of the running requests, at 50 to 80 % of the GPU's
               bandwidth, and the host takes 2 to 10 ms; prompts are computed at the rate of training

With `buffer.lookahead` the two go on at the same time, and the slower one counts. Waits for the environment, for
scorers and for the longest trajectory are not included.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from service.config import BufferConfig
from service.errors import UserError
from service.plan.memory import ENGINE_BYTES, GPUS_OF_A_NODE, FitSettings, Gpu, fit, rank_bytes

OF_PEAK, OF_BANDWIDTH, HOST_SECONDS = (0.5, 0.3), (0.8, 0.5), (0.002, 0.01)
"""The fast and the slow end of each range, as fractions of the GPU's rates and in seconds."""
MAX_SPLITS = 16
"""Maximum number of splits in the table; if there are more, about this number is shown, evenly spread."""


class Work(NamedTuple):
    """The mean trajectory, in tokens."""

    turns: float
    prompt: float
    response: float
    """Sampled tokens of a turn."""
    observation: float
    """Tokens that the environment adds between two turns."""

    @property
    def sampled(self) -> float:
        """Sampled tokens of the trajectory."""
        return self.turns * self.response

    @property
    def length(self) -> float:
        """All tokens of the trajectory."""
        return self.prompt + self.sampled + (self.turns - 1) * self.observation


class Seconds(NamedTuple):
    """A range of seconds."""

    fast: float
    slow: float


class Split(NamedTuple):
    """A split of the GPUs, with the seconds of a step."""

    engines: int
    ranks: int
    training: Seconds
    decoding: Seconds
    step: Seconds
    rank: float
    """Bytes on the GPU of a rank; engines are the same in all splits."""
    fits: bool
    """Whether the rank fits its GPU."""


class SplitTable:
    """The memory of a configuration, and the seconds of a step with any split."""

    def __init__(self, settings: FitSettings, buffer: BufferConfig, folder: Path, gpu: Gpu, work: Work) -> None:
        self.settings, self._buffer, self._gpu, self.work = settings, buffer, gpu, work
        self.fit, self._trainer = fit(settings, folder, gpu.memory), settings.learn.trainer
        self.trajectories = self._trainer.mini_batch_size * settings.learn.algorithm.n_samples_per_prompt

    def splits(self, gpus: int) -> list[Split]:
        """Splits that use `gpus` GPUs, at most about `MAX_SPLITS`, evenly spread; `UserError` if there is none."""
        each, together = self.settings.generator.engine_gpus, self._trainer.sequence_parallel
        if self.settings.shares_gpus:
            found = [(engines, gpus) for engines in range(1, max(1, gpus // each) + 1)]
        else:
            node = GPUS_OF_A_NODE if self._trainer.shard_within == "node" else 1
            pairs = ((engines, gpus - engines * each) for engines in range(1, (gpus - 1) // each + 1))
            found = [(n, ranks) for n, ranks in pairs if ranks % together == 0 and (ranks <= node or ranks % node == 0)]
        if not found:
            raise UserError(
                f"--gpus {gpus}: no number of engines with {each} GPUs each leaves GPUs that ranks in groups of "
                f"{together} can use; give another number"
            )
        return [self.split(*pair) for pair in found[:: -(-len(found) // MAX_SPLITS)]]

    def split(self, engines: int, ranks: int) -> Split:
        """The seconds of a step with this number of engines and of ranks."""
        flops = self._training_flops() / ranks
        training = Seconds(*(flops / self._gpu.flops / share for share in OF_PEAK))
        decoding = self._decoding(engines)
        alternate = self.settings.shares_gpus or self._buffer.lookahead == 0
        step = Seconds(*(sum(ends) if alternate else max(ends) for ends in zip(training, decoding, strict=True)))
        held = rank_bytes(self.fit.size, self.settings.learn, self.fit.checkpointing, ranks)
        rank = sum(held.values()) + self.fit.rank["engine"]
        return Split(engines, ranks, training, decoding, step, rank, rank <= self.fit.room)

    def _training_flops(self) -> float:
        """FLOPs of a step, without recomputation: 2 for each parameter and token in a forward pass, twice that in the
        backward pass, and causal attention."""
        size, learn, length = self.fit.size, self.settings.learn, self.work.length
        passes = 2 if learn.model.lora else 3  # frozen weights need no gradient
        passes += (learn.algorithm.kl_coef > 0) + (learn.algorithm.anchor == "proximal")
        of_token = 2.0 * passes * (size.active + size.layers * size.query_width * length)
        return of_token * length * self.trajectories

    def _decoding(self, engines: int) -> Seconds:
        """Seconds in which the engines generate the trajectories of a step."""
        work, generator, kv_token = self.work, self.settings.generator, self.fit.kv_token_bytes
        groups = min(generator.concurrent_groups, (self._buffer.lookahead + 1) * self._trainer.mini_batch_size)
        in_flight = groups * self.settings.learn.algorithm.n_samples_per_prompt / engines
        running = max(1.0, min(in_flight, self.fit.kv_bytes / (kv_token * work.length)))
        caches = running * (work.prompt + work.length) / 2 * kv_token
        read = (self.fit.engine_bytes - ENGINE_BYTES + caches) / self._gpu.bandwidth
        iterations = self.trajectories * work.sampled / engines / running
        others = self.trajectories * (work.length - work.sampled) / engines
        computed = 2 * self.fit.size.active * others / generator.engine_gpus / self._gpu.flops
        ends = zip(OF_BANDWIDTH, HOST_SECONDS, OF_PEAK, strict=True)
        return Seconds(*(iterations * (read / of + host) + computed / peak for of, host, peak in ends))
