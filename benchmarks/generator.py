"""The cost of the agent loop over bare vLLM, and the cost of a weight update: `python -m benchmarks.generator`.

Both halves of a comparison run in the same processes, in turn: the requests of one round's trajectories are sent
directly to the same vLLM in the next round, as chains of the same numbers of turns and tokens. Besides tokens per
second there are tokens per second of CPU time of the actor and its engine, which other load on the machine disturbs
less.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from safetensors.torch import load_file

from actors.buffer.actor import BufferActor, LeasedBatch
from actors.deaths import WATCHING
from actors.engine.run_player import RunPlayer
from actors.engine.vllm_engine import VllmEngine, engine_env
from actors.generator.actor import Generator
from actors.observe.metrics_hub import MetricsHub
from actors.weights.part_buffers import PartBuffers
from baton.examples import lookup
from benchmarks.own_ray import own_ray
from service.config import (
    AlgorithmConfig,
    BufferConfig,
    Config,
    DataConfig,
    EnvConfig,
    GeneratorConfig,
    MakeModelConfig,
    MetricsConfig,
    ModelConfig,
    RunConfig,
    TrainerConfig,
)
from service.learn.model.sharding import Rows
from service.learn.model.tiny_model import make_model
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.engine import Generation, Sampling
from service.rollout.prompts.dataset import write_rows
from service.types import Int32s, PolicyVersion

SAMPLES = 8
CONCURRENT = 64
"""The number of trajectories that are played at once."""
SHAPES = {
    "tiny": (MakeModelConfig(), 0, 8),
    "50M": (
        MakeModelConfig(
            hidden_size=512, intermediate_size=2048, num_layers=10, num_heads=8, num_kv_heads=4, head_dim=64
        ),
        20_000,
        65,
    ),
}
"""The model, the number of further words in its vocabulary, and the tokens of a turn with its end token."""


class Round(NamedTuple):
    """The tokens that a round generated, and the time that it took."""

    tokens: int
    seconds: float
    cpu_seconds: float


class Turn(NamedTuple):
    """The prompt tokens that a request adds to the one before, and how many tokens were sampled for it."""

    delta: list[int]
    n_tokens: int


class Recorder(VllmEngine):
    """An engine that records its requests, and can send the same requests to vLLM without an agent loop."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        self.chains: defaultdict[str, list[Turn]] = defaultdict(list)
        self._known: dict[str, int] = {}

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        generation = await super().generate(prompt_ids, sampling, request_id)
        trajectory = request_id.partition("/turn=")[0]
        delta = prompt_ids[self._known.get(trajectory, 0) :].tolist()
        self._known[trajectory] = len(prompt_ids) + len(generation.token_ids)
        self.chains[trajectory].append(Turn(delta, len(generation.token_ids)))
        return generation

    async def replay(self) -> int:
        """Send every recorded chain directly to vLLM; returns the number of generated tokens."""
        chains, self.chains = list(self.chains.values()), defaultdict(list)
        await self._running().reset_prefix_cache()
        slots = asyncio.Semaphore(CONCURRENT)
        return sum(await asyncio.gather(*(self._play(chain, slots) for chain in chains)))

    async def _play(self, chain: list[Turn], slots: asyncio.Semaphore) -> int:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompt_ids: list[int] = []
        tokens = 0
        async with slots:
            for turn in chain:
                params = SamplingParams(
                    max_tokens=turn.n_tokens,
                    ignore_eos=True,
                    logprobs=0,
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,
                )
                prompt_ids += turn.delta
                prompt = {"type": "token", "prompt_token_ids": prompt_ids}
                async for output in self._running().generate(prompt, params, "replay"):
                    sampled = output.outputs[0].token_ids
                prompt_ids = [*prompt_ids, *sampled]
                tokens += len(sampled)
        return tokens


class BenchedGenerator(Generator):
    """A generator whose engine is a `Recorder`."""

    def __init__(self, name: str, config_json: str, model_folder: str, tasks_file: str, buffer: Any, hub: Any) -> None:
        super().__init__(name, config_json, model_folder, tasks_file, buffer, hub)
        self._engine: Recorder = Recorder(self._config, Path(model_folder))
        self._player = RunPlayer(self._config, Path(model_folder), self._engine)

    async def replay(self) -> Round:
        """Send the recorded requests without an agent loop."""
        start, cpu = time.monotonic(), await self.cpu_seconds()
        tokens = await self._engine.replay()
        return Round(tokens, time.monotonic() - start, await self.cpu_seconds() - cpu)

    async def cpu_seconds(self) -> float:
        """CPU time of this process and of the engine's process so far."""
        actor = psutil.Process()
        times = [process.cpu_times() for process in (actor, *actor.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    async def load(self, n_requests: int, n_tokens: int) -> list[int]:
        """Send `n_requests` requests at once; returns the lengths of the responses."""
        sampling = Sampling(max_tokens=n_tokens)
        prompts = [np.random.default_rng(i).integers(10, 60, 32).astype(np.int32) for i in range(n_requests)]
        turns = (self._engine.generate(p, sampling, f"load-{i}") for i, p in enumerate(prompts))
        return [len(generation.token_ids) for generation in await asyncio.gather(*turns)]


def configuration(shape: MakeModelConfig, turn_tokens: int, groups: int, folder: Path) -> Config:
    """A strictly on-policy configuration, so that a round is exactly `groups` groups; 64 trajectories at once."""
    return Config(
        run=RunConfig(dir=folder),
        model=ModelConfig(dtype="float32", make=shape),
        data=DataConfig(make_rows=512),
        env=EnvConfig(max_turns=4),
        generator=GeneratorConfig(
            concurrent_groups=CONCURRENT // SAMPLES,
            max_input_length=128 + 4 * turn_tokens,
            max_generate_length=turn_tokens,
        ),
        buffer=BufferConfig(lookahead=0),
        algorithm=AlgorithmConfig(n_samples_per_prompt=SAMPLES),
        trainer=TrainerConfig(mini_batch_size=groups, ranks=1, max_tokens_per_micro_batch=1 << 20),
        metrics=MetricsConfig(port=0),
    )


class Road:
    """The actors of a run without a trainer, started."""

    def __init__(self, name: str, groups: int, folder: Path) -> None:
        import ray

        self._get = ray.get
        shape, words, turn_tokens = SHAPES[name]
        self.config = config = configuration(shape, turn_tokens, groups, folder)
        self.model = folder / "model"
        make_tokenizer(self.model, (*lookup.vocabulary(), *(f"w{i}" for i in range(words))))
        tokenizer = load_tokenizer(self.model)
        make_model(self.model, shape, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, seed=0)
        tasks_file = folder / "train.jsonl"
        write_rows(tasks_file, lookup.rows(512, 0))
        config_json = config.model_dump_json()
        hub = ray.remote(MetricsHub).options(num_cpus=0).remote(config_json)
        self.buffer = (
            ray.remote(BufferActor)
            .options(num_cpus=0, max_concurrency=1000)
            .remote(config_json, len(tokenizer), str(tasks_file), str(folder / "journal"), hub)
        )
        self.generator = (
            ray.remote(concurrency_groups={WATCHING: 1})(BenchedGenerator)
            .options(num_cpus=1, max_concurrency=1000, runtime_env={"env_vars": engine_env(config.generator)})
            .remote("generator-0", config_json, str(self.model), str(tasks_file), self.buffer, hub)
        )
        self.call("start")
        self.incarnation = self._get(self.buffer.join.remote("trainer", "trainer"))
        self.version = PolicyVersion(self.incarnation, 0)
        weights = load_file(self.model / "model.safetensors")
        self.rows = {name: Rows(tuple(tensor.shape), 0, tensor) for name, tensor in weights.items()}
        self.buffers = PartBuffers()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the generator."""
        return self._get(getattr(self.generator, method).remote(*arguments))

    def publish(self) -> dict[str, float]:
        """Send the same weights as the current version."""
        version = self.version.pack()
        self.buffers.copy(version, self.rows, next(iter(self.rows.values())).rows.dtype)
        sources = [self.buffers.source]
        update: dict[str, float] = self.call("update_weights", version, sources, 0)
        return update

    def advance(self) -> None:
        """Lease and commit a mini-batch without training it, and publish, so that the next round of groups begins."""
        leased = self._get(self.buffer.lease.remote(self.incarnation, 60.0))
        if not isinstance(leased, LeasedBatch):
            raise RuntimeError(f"no mini-batch: {leased}")
        self.version = PolicyVersion(self.incarnation, self.version.step + 1)
        self._get(self.buffer.commit.remote(self.incarnation, leased.lease, self.version))
        self.publish()

    def round(self, before: dict[str, Any], cpu_before: float) -> Round:
        """Wait for the end of the round that has just begun."""
        start = time.monotonic()
        while True:
            status = self.call("status")
            finished = status["counts"].get("groups", 0) > before["counts"].get("groups", 0)
            if finished and status["groups"] == 0 and (status["waiting"] or "").startswith("lookahead"):
                break
            time.sleep(0.05)
        seconds = time.monotonic() - start
        tokens = status["engine"]["generated_tokens"] - before["engine"].get("generated_tokens", 0)
        return Round(tokens, seconds, self.call("cpu_seconds") - cpu_before)


def agent_loop_cost(road: Road, rounds: int) -> dict[str, float]:
    """Compare the generator with bare vLLM, in turn."""
    pairs = []
    before, cpu = road.call("status"), road.call("cpu_seconds")
    work = road.generator.run.remote()
    road.publish()
    for i in range(rounds + 1):
        pair = road.round(before, cpu), Round(*road.call("replay"))
        if i:  # the first round warms up
            pairs.append(pair)
            loop, bare = (f"{r.tokens / r.seconds:7.0f} tokens/s {r.tokens / r.cpu_seconds:7.0f}/CPU s" for r in pair)
            print(f"  generator {loop}   bare vLLM {bare}", flush=True)
        before, cpu = road.call("status"), road.call("cpu_seconds")
        if i < rounds:
            road.advance()
    del work
    return {
        "generator_tokens_per_second": statistics.median(g.tokens / g.seconds for g, _ in pairs),
        "vllm_tokens_per_second": statistics.median(v.tokens / v.seconds for _, v in pairs),
        "ratio": statistics.median((g.tokens / g.seconds) / (v.tokens / v.seconds) for g, v in pairs),
        "ratio_per_cpu_second": statistics.median(
            (g.tokens / g.cpu_seconds) / (v.tokens / v.cpu_seconds) for g, v in pairs
        ),
    }


def update_cost(road: Road, updates: int) -> dict[str, Any]:
    """The pauses of updates under load, against the time of writing the same bytes to shared memory once."""
    load = road.generator.load.remote(1024, road.config.generator.max_generate_length - 1)
    pauses, writes = [], []
    weights = road.buffers._memory.octets().numpy().tobytes()
    for _ in range(updates):
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
            start = time.monotonic()
            file.write(weights)
            file.flush()
            writes.append(time.monotonic() - start)
        pauses.append(road.publish()["pause_seconds"])
    lengths = road._get(load)
    return {
        "bytes": len(weights),
        "updates": updates,
        "pause_seconds": statistics.median(pauses),
        "longest_pause_seconds": max(pauses),
        "write_seconds": statistics.median(writes),
        "pauses_per_write": statistics.median(p / w for p, w in zip(pauses, writes, strict=True)),
        "bytes_per_second": len(weights) / statistics.median(pauses),
        "requests": len(lengths),
        "tokens": sum(lengths),
    }


def main() -> int:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generator", description=__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="50M")
    parser.add_argument("--part", choices=["loop", "updates"], help="only what the agent loop or what updates cost")
    parser.add_argument("--groups", type=int, default=8, help="groups of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="baton-", ignore_cleanup_errors=True) as folder, own_ray(folder):
        road = Road(arguments.shape, arguments.groups, Path(folder) / "run")
        figures: dict[str, Any] = {"shape": arguments.shape}
        if arguments.part != "updates":
            figures |= agent_loop_cost(road, arguments.rounds)
        if arguments.part != "loop":
            figures |= update_cost(road, arguments.updates)
        road.call("stop")
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
