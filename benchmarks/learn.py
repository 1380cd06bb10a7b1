"""Training steps on CPU on the same rows, in one run: padded and packed, packed and shared, without and with supports.

    python -m benchmarks.learn

Both layouts train the same rows with the same learner. The padded baseline has a fixed number of rows per micro-batch,
each left-padded to the longest of them, with an attention mask (trainers that pad to the longest row of the whole
mini-batch waste more); packed rows have the same micro-batches there. Against shared prefixes, Baton's own code
distributes the rows over micro-batches, with the same token budget. Every measurement runs in a separate process,
layouts alternate, and the medians are compared. Time is CPU time of the process; memory is the peak beyond the memory
of the loaded learner.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from service.config.learn import TrainerConfig
from service.config.tree import Config, ModelConfig
from service.handoff.batches.pack import place, place_sharing, prefix_order
from service.learn.device_batch import unsampled_micro_batch
from service.learn.learner import Learner
from service.learn.model.tiny_model import make_model
from service.learn.settings import LearnSettings
from service.types import MicroBatch, MiniBatch, SupervisedRow

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
VOCABULARY = 8192
ROWS, ROWS_A_MICRO_BATCH, LONGEST = 16, 8, 3000
PROMPT, SAMPLES = 1500, 8
TURNS, THINKING, ANSWER, OBSERVATION = 8, 100, 100, 300
PADDED, SHARED, SUPPORTED = ("padded", "packed"), ("packed", "shared_prefix"), ("packed", "supported")
BUDGET = 16384
"""Tokens of a micro-batch, against shared prefixes."""

Rows = list[tuple[int, SupervisedRow]]
"""Each row with its trajectory."""


def lengths() -> np.ndarray:
    """Row lengths of a long-tail mix: lognormal, sigma 1, median 500, at most 3000; one row always has 3000."""
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(np.log(500), 1.0, ROWS), 32, LONGEST).astype(int)
    drawn[0] = LONGEST
    return rng.permutation(drawn)


def apart(rng: np.random.Generator) -> Rows:
    """Rows of a long-tail mix that share nothing, with two thirds of their tokens sampled."""
    return [(g, made_row(_drawn(rng, length), length // 3)) for g, length in enumerate(lengths())]


def samples(rng: np.random.Generator) -> Rows:
    """Eight samples of a prompt of 1500 tokens, with responses of 200 to 400 tokens."""
    prompt = _drawn(rng, PROMPT)
    responses = [_drawn(rng, int(rng.integers(200, 401))) for _ in range(SAMPLES)]
    return [(g, made_row(np.concatenate([prompt, response]), PROMPT)) for g, response in enumerate(responses)]


def conversation(rng: np.random.Generator) -> Rows:
    """A conversation whose thinking is stripped from the history at each turn, so that each turn is a row."""
    history, rows = _drawn(rng, PROMPT), []
    for _ in range(TURNS):
        thinking, answer, observation = (_drawn(rng, length) for length in (THINKING, ANSWER, OBSERVATION))
        rows.append((0, made_row(np.concatenate([history, thinking, answer]), len(history))))
        history = np.concatenate([history, answer, observation])
    return rows


def _drawn(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, length)


class Workload(NamedTuple):
    """Rows, and the two layouts that are compared on them."""

    rows: Callable[[np.random.Generator], Rows]
    layouts: tuple[str, str]
    faster: float
    """The minimum speed-up of the second layout."""


WORKLOADS = {
    "long tail": Workload(apart, PADDED, 2.0),
    "samples": Workload(samples, SHARED, 2.0),
    "conversation": Workload(conversation, SHARED, 3.0),
    "apart": Workload(apart, SHARED, 1 / 1.05),
    "supports": Workload(samples, SUPPORTED, 1 / 1.05),
}


def mini_batch(name: str, layout: str) -> MiniBatch:
    """The workload's rows as a mini-batch, with micro-batches for a layout."""
    workload = WORKLOADS[name]
    made = workload.rows(np.random.default_rng(0))
    trajectory_R, rows = np.array([trajectory for trajectory, _ in made], np.int32), [row for _, row in made]
    packed = unsampled_micro_batch(rows)
    length_R, prompt_G = np.diff(packed.offsets_R), np.zeros(int(trajectory_R.max()) + 1, np.int32)
    chosen: Sequence[Sequence[int]]
    if workload.layouts == PADDED:
        chosen = [range(start, start + ROWS_A_MICRO_BATCH) for start in range(0, ROWS, ROWS_A_MICRO_BATCH)]
    elif layout != "shared_prefix":
        chosen = place(length_R, trajectory_R, 1, BUDGET).ranks[0]
    else:
        order = prefix_order(packed.token_ids_N, packed.offsets_R)
        chosen = place_sharing(order, length_R, trajectory_R, prompt_G, 1, BUDGET).ranks[0]
    micros = [micro_batch_of([rows[i] for i in mine], trajectory_R[list(mine)]) for mine in chosen]
    micros = [with_supports(micro) for micro in micros] if layout == "supported" else micros
    return mini_batch_of(micros, len(prompt_G))


def computed_tokens(batch: MiniBatch, layout: str) -> int:
    """The number of computed tokens, padding included."""
    found = 0
    for micro in batch.ranks[0]:
        length_R = np.diff(micro.offsets_R)
        found += int(len(length_R) * length_R.max()) if layout == "padded" else len(micro.token_ids_N)
        if layout == "shared_prefix":
            found -= int(prefix_order(micro.token_ids_N, micro.offsets_R).shared_R.sum())
    return found


def made_row(token_ids: np.ndarray, prompt: int) -> SupervisedRow:
    """A row whose tokens after the prompt were sampled; the prompt has at least one token."""
    return SupervisedRow(token_ids.astype(np.int32), np.arange(len(token_ids)) >= max(1, prompt))


def micro_batch_of(rows: Sequence[SupervisedRow], trajectories: Sequence[int]) -> MicroBatch:
    """Rows packed in this order, whose tokens had a low probability when they were sampled."""
    micro = unsampled_micro_batch(rows)
    return replace(
        micro,
        logprobs_N=np.where(micro.loss_mask_N, -9.0, 0.0).astype(np.float32),
        staleness_N=np.where(micro.loss_mask_N, 0, -1).astype(np.int32),
        trajectory_of_row_R=np.array(trajectories, np.int32),
    )


def with_supports(micro: MicroBatch) -> MicroBatch:
    """The micro-batch, whose tokens were drawn from 20 tokens each."""
    others_MU = np.sort((micro.token_ids_N[micro.loss_mask_N, None] + np.arange(1, 20) * 397) % VOCABULARY)
    sizes_N, others_U = micro.loss_mask_N * np.uint16(20), others_MU.reshape(-1).astype(np.uint16)
    return replace(micro, support_size_N=sizes_N, support_U=others_U)


def mini_batch_of(micros: Sequence[MicroBatch], trajectories: int) -> MiniBatch:
    """The micro-batches of one rank and one prompt, with random advantages."""
    owner = np.concatenate([micro.trajectory_of_row_R for micro in micros])
    tokens = [int(part.sum()) for micro in micros for part in np.split(micro.loss_mask_N, micro.offsets_R[1:-1])]
    return MiniBatch(
        lease=0,
        groups=(0,),
        advantage_G=np.random.default_rng(0).normal(size=trajectories).astype(np.float32),
        return_G=np.zeros(trajectories),
        loss_tokens_G=np.bincount(owner, tokens, minlength=trajectories).astype(np.int64),
        rows_G=np.bincount(owner, minlength=trajectories).astype(np.int32),
        prompt_of_trajectory_G=np.zeros(trajectories, np.int32),
        ranks=(tuple(micros),),
        metrics={},
    )


def measure(layout: str, folder: Path, batch: MiniBatch) -> dict[str, float]:
    """Measure one step in this process, after a warm-up step."""
    torch.set_num_threads(1)
    trainer = TrainerConfig.model_validate({"lr": 1e-4, "layout": layout.replace("supported", "packed")})
    config = Config(model=ModelConfig(dtype="float32"), trainer=trainer)
    learner = Learner(LearnSettings.of(config), folder, torch.device("cpu"), 0, 1)
    learner.step(mini_batch_of([micro_batch_of([made_row(np.arange(32), 10)], [0])], 1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    report = learner.step(batch)
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "mebibytes": peak / 1024, "loss": report.metrics["policy/policy_loss"]}


def compare(workload: str, repeats: int) -> list[dict[str, float]]:
    """Medians of each layout: alternating measurements, each in a separate process."""
    runs: dict[str, list[dict[str, float]]] = {layout: [] for layout in WORKLOADS[workload].layouts}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), SHAPE, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=0)
        for _ in range(repeats):
            for layout, results in runs.items():
                command = [sys.executable, "-m", "benchmarks.learn", "--workload", workload, "--one", layout, folder]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
    return [{name: statistics.median(run[name] for run in of) for name in of[0]} for of in runs.values()]


def main() -> int:
    """Measure and print; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learn", description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, help="only this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("LAYOUT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        layout, folder = options.one
        print(json.dumps(measure(layout, Path(folder), mini_batch(options.workload, layout))))
        return 0
    missed = 0
    print("| rows | layouts | tokens | CPU s a step | faster | memory | loss differs |\n|---|---|---|---|---|---|---|")
    for workload in [options.workload] if options.workload else WORKLOADS:
        layouts = WORKLOADS[workload].layouts
        tokens = " / ".join(str(computed_tokens(mini_batch(workload, layout), layout)) for layout in layouts)
        slow, fast = compare(workload, options.repeats)
        faster, smaller = (slow[name] / fast[name] for name in ("seconds", "mebibytes"))
        seconds = f"{slow['seconds']:.2f} / {fast['seconds']:.2f} | {faster:.2f}"
        memory = f"{slow['mebibytes']:.0f} / {fast['mebibytes']:.0f} MiB"
        differs = f"{abs(slow['loss'] - fast['loss']):.0e}"
        print(f"| {workload} | {' / '.join(layouts)} | {tokens} | {seconds} | {memory} | {differs} |", flush=True)
        missed += faster < WORKLOADS[workload].faster or (layouts == PADDED and smaller < 2)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
