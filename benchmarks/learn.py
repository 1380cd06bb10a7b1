"""Padded training steps against packed ones on CPU, on a long-tail mix of rows, in one run.

    python -m benchmarks.learn

Both variants train the same rows in the same micro-batches with the same learner; only `trainer.layout` differs.
The padded baseline has a fixed number of rows per micro-batch, each left-padded to the longest of them, with an
attention mask (trainers that pad to the longest row of the whole mini-batch waste more). Every measurement runs in a
separate process, variants alternate, and the medians are compared. Time is CPU time of the process; memory is the peak
beyond the memory of the loaded learner.
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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from service.config.learn import TrainerConfig
from service.config.tree import Config, ModelConfig
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


def lengths(seed: int) -> np.ndarray:
    """Row lengths of a long-tail mix: lognormal, sigma 1, median 500, at most 3000; one row always has 3000."""
    rng = np.random.default_rng(seed)
    drawn = np.clip(rng.lognormal(np.log(500), 1.0, ROWS), 32, LONGEST).astype(int)
    drawn[0] = LONGEST
    return rng.permutation(drawn)


def mini_batch(seed: int) -> MiniBatch:
    """Rows with two thirds of their tokens sampled, in random order, with a fixed number of rows per micro-batch."""
    rng = np.random.default_rng(seed)
    row_lengths = lengths(seed)
    rows = [made_row(rng.integers(0, VOCABULARY, length), length // 3) for length in row_lengths]
    chosen = [range(start, start + ROWS_A_MICRO_BATCH) for start in range(0, ROWS, ROWS_A_MICRO_BATCH)]
    return mini_batch_of([micro_batch_of([rows[i] for i in mine], list(mine)) for mine in chosen], ROWS)


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
    config = Config(model=ModelConfig(dtype="float32"), trainer=TrainerConfig(lr=1e-4, layout=layout))
    learner = Learner(LearnSettings.of(config), folder, torch.device("cpu"), 0, 1)
    learner.step(_first_row(batch))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    report = learner.step(batch)
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": seconds, "mebibytes": peak / 1024, "loss": report.metrics["policy/policy_loss"]}


def _first_row(batch: MiniBatch) -> MiniBatch:
    """A short batch for the warm-up step."""
    micro = micro_batch_of([made_row(np.arange(32), 10)], [0])
    tokens = np.zeros_like(batch.loss_tokens_G)
    tokens[0] = micro.loss_mask_N.sum()
    return replace(batch, ranks=((micro,),), loss_tokens_G=tokens)


def compare(module: str, layouts: Sequence[str], repeats: int, *options: str) -> dict[str, dict[str, float]]:
    """Medians of alternating measurements, each in a separate process: `module --one LAYOUT FOLDER options`."""
    runs: dict[str, list[dict[str, float]]] = {layout: [] for layout in layouts}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), SHAPE, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=0)
        for _ in range(repeats):
            for layout, results in runs.items():
                command = [sys.executable, "-m", module, "--one", layout, folder, *options]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.append(json.loads(done.stdout.splitlines()[-1]))
    return {
        layout: {name: statistics.median(run[name] for run in results) for name in results[0]}
        for layout, results in runs.items()
    }


def main() -> int:
    """Measure and print; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one", nargs=2, metavar=("LAYOUT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        layout, folder = options.one
        print(json.dumps(measure(layout, Path(folder), mini_batch(options.seed))))
        return 0
    rows = lengths(options.seed)
    slots = sum(ROWS_A_MICRO_BATCH * rows[i : i + ROWS_A_MICRO_BATCH].max() for i in range(0, ROWS, ROWS_A_MICRO_BATCH))
    print(f"{ROWS} rows, {rows.sum()} tokens, longest {rows.max()}; padded: {slots} slots ({slots / rows.sum():.2f}x)")
    found = compare("benchmarks.learn", ("padded", "packed"), options.repeats, "--seed", str(options.seed))
    print(f"{'layout':8} {'CPU s a step':>14} {'peak MiB':>10} {'loss':>10}")
    for layout, values in found.items():
        print(f"{layout:8} {values['seconds']:14.2f} {values['mebibytes']:10.0f} {values['loss']:10.5f}")
    time_ratio, memory_ratio = (found["padded"][k] / found["packed"][k] for k in ("seconds", "mebibytes"))
    print(f"padded over packed: time {time_ratio:.2f}, memory {memory_ratio:.2f} (bars: 2 and 2)")
    return 0 if min(time_ratio, memory_ratio) >= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
