"""Memory of ranks that share the tokens of a micro-batch, and a row that no rank could train alone, on CPU.

    python -m benchmarks.sequence_parallel          minutes on two quiet cores

The first part trains the same micro-batch on one rank and on groups of ranks. Memory is the peak of all tensors during
the step minus their memory before it (by the profiler's memory events), on the rank with the largest peak.

The second part trains a row of 131,072 tokens. Once the policy is loaded, each process may allocate only a limited
number of further bytes (RLIMIT_DATA): four ranks must complete their step, one rank alone must run out of memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks import learn
from benchmarks.learn import made_row, micro_batch_of, mini_batch_of
from service.config.learn import TrainerConfig
from service.config.tree import Config, ModelConfig
from service.learn.learner import Learner
from service.learn.model.tiny_model import make_model
from service.learn.settings import LearnSettings
from service.types import MiniBatch

VOCABULARY = 512
SHAPE = learn.SHAPE | {"hidden_size": 128, "intermediate_size": 384, "head_dim": 16}
ROWS = (6000, 1500, 692)
GROUPS = (1, 2, 4)
LEAST = {1: 1.0, 2: 1.7, 4: 2.5}
"""Ranks of a group -> the factor by which each must at least need less memory than one rank alone."""

LONG_SHAPE = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LONG_SHAPE |= {"num_key_value_heads": 2, "head_dim": 8}
LONG_ROW, LONG_GROUP = 131_072, 4
LIMIT = 800 << 20
"""Bytes that a process of the second part may allocate for the step."""


def mini_batch(lengths: tuple[int, ...]) -> MiniBatch:
    """One micro-batch of rows of these lengths; the first third of each row is the prompt."""
    rng = np.random.default_rng(0)
    rows = [made_row(rng.integers(0, VOCABULARY, length), length // 3) for length in lengths]
    return mini_batch_of([micro_batch_of(rows, range(len(rows)))], len(rows))


def peak_of_tensors(run: Callable[[], object]) -> int:
    """Peak bytes of tensors during the call, beyond their bytes before it, by the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    held = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += size
        peak = max(peak, held)
    return peak


def limit_memory(more: int) -> None:
    """Let this process allocate at most `more` bytes beyond its present memory."""
    has = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    limit = int(has.split()[1]) * 1024 + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def train(folder: Path, rank: int, ranks: int, lengths: tuple[int, ...], limit: int | None) -> dict[str, float | str]:
    """Take a step as one rank of a group, after a short warm-up step."""
    trainer = TrainerConfig(ranks=ranks, sequence_parallel=ranks, lr=1e-4, gradient_checkpointing=False)
    config = Config(model=ModelConfig(dtype="float32"), trainer=trainer)
    learner = Learner(LearnSettings.of(config), folder, torch.device("cpu"), rank, ranks)
    learner.step(mini_batch((64,)))
    batch, found = mini_batch(lengths), {}
    if limit is not None:
        limit_memory(limit)
    started = time.process_time()
    try:
        if limit is None:
            found["bytes"] = float(peak_of_tensors(lambda: learner.accumulate(batch)))
            learner.policy.master_weights.drop_gradients()
        report = learner.step(batch)
    except RuntimeError as error:  # torch has no separate error for a failed allocation of CPU memory
        if "can't allocate memory" not in str(error):
            raise
        return {"failed": "out of memory"}
    return found | {"loss": report.metrics["policy/policy_loss"], "seconds": time.process_time() - started}


def group(folder: Path, ranks: int, part: str) -> list[dict[str, float | str]]:
    """Run each rank of a group in a separate process; returns the result of each rank."""
    with tempfile.TemporaryDirectory() as meeting:
        module = [sys.executable, "-m", "benchmarks.sequence_parallel"]
        commands = [[*module, "--part", part, str(folder), meeting, str(ranks), str(rank)] for rank in range(ranks)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes = [subprocess.Popen(command, **pipes) for command in commands]
        outputs = [process.communicate() for process in processes]
    for process, (_, said) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank of {ranks} failed: {said}")
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def one_rank(part: str, folder: str, meeting: str, ranks: int, rank: int) -> None:
    """The main function of a rank's process."""
    torch.set_num_threads(1)
    if ranks > 1:
        store = f"file://{meeting}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(hours=2))
    lengths, limit = (ROWS, None) if part == "memory" else ((LONG_ROW,), LIMIT)
    print(json.dumps(train(Path(folder), rank, ranks, lengths, limit)))


def made(shape: Mapping[str, int], parent: str) -> Path:
    """Write a model of this shape with random weights; returns its folder."""
    folder = Path(parent) / f"model_{shape['hidden_size']}"
    make_model(folder, shape, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=0)
    return folder


def memory(parent: str) -> int:
    """Print the memory of a rank of each group; returns the number of missed bars."""
    missed, alone = 0, 0.0
    print("| ranks | MiB of a rank | less | CPU s of a rank | loss |\n|---|---|---|---|---|")
    for ranks in GROUPS:
        results = group(made(SHAPE, parent), ranks, "memory")
        held, seconds = (max(float(each[name]) for each in results) for name in ("bytes", "seconds"))
        alone = alone or held
        missed += alone / held < LEAST[ranks]
        loss = results[0]["loss"]
        print(f"| {ranks} | {held / 2**20:.0f} | {alone / held:.2f} | {seconds:.1f} | {loss:.6f} |", flush=True)
    return missed


def long_row(parent: str) -> int:
    """Print how a group and a single rank handle the long row; returns 1 if not as expected."""
    folder = made(LONG_SHAPE, parent)
    print(f"\na row of {LONG_ROW} tokens, {LIMIT >> 20} MiB a process for its step", flush=True)
    ended = []
    for ranks in (LONG_GROUP, 1):
        results = group(folder, ranks, "long")
        ended.append(all("loss" in each for each in results))
        seconds = max(float(each.get("seconds", 0)) for each in results)
        told = f"loss {results[0]['loss']:.6f}, {seconds:.0f} CPU s a rank" if ended[-1] else "out of memory"
        print(f"{ranks} ranks: {told}", flush=True)
    return 0 if ended == [True, False] else 1


def main() -> int:
    """Measure and print; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part, folder, meeting, ranks, rank = options.part
        one_rank(part, folder, meeting, int(ranks), int(rank))
        return 0
    with tempfile.TemporaryDirectory() as parent:
        return 1 if memory(parent) + long_row(parent) else 0


if __name__ == "__main__":
    sys.exit(main())
