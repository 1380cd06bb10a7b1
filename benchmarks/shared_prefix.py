"""Training steps on rows that begin alike: layout with shared prefixes against packed layout, on CPU, in one run.

    python -m benchmarks.shared_prefix

Both layouts train the same rows with the same learner. Baton's own code distributes the rows over micro-batches, with
the same token budget. Every measurement runs in a separate process, layouts alternate, and medians are compared. Time
is CPU time of the process; memory is the peak beyond the memory of the loaded learner.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.learn import VOCABULARY, compare, lengths, made_row, measure, micro_batch_of, mini_batch_of
from service.handoff.batches.pack import place, place_sharing, prefix_order
from service.learn.device_batch import unsampled_micro_batch
from service.types import MiniBatch, SupervisedRow

PROMPT, SAMPLES = 1500, 8
TURNS, THINKING, ANSWER, OBSERVATION = 8, 100, 100, 300
LAYOUTS = ("packed", "shared_prefix")
BUDGET = 16384
"""Tokens of a micro-batch."""

Rows = list[tuple[int, SupervisedRow]]
"""Each row with its trajectory."""


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


def apart(rng: np.random.Generator) -> Rows:
    """Rows of a long-tail mix that share nothing."""
    return [(g, made_row(_drawn(rng, length), length // 3)) for g, length in enumerate(lengths(0))]


WORKLOADS: dict[str, tuple[Callable[[np.random.Generator], Rows], float]] = {
    "samples": (samples, 2.0),
    "conversation": (conversation, 3.0),
    "apart": (apart, 1 / 1.05),
}
"""The rows of each workload, and the minimum speed-up of the layout with shared prefixes."""


def _drawn(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, length)


def mini_batch(workload: str, layout: str) -> MiniBatch:
    """The workload's rows as a mini-batch, with micro-batches for a layout."""
    rows = WORKLOADS[workload][0](np.random.default_rng(0))
    trajectory_R = np.array([trajectory for trajectory, _ in rows], np.int32)
    packed = unsampled_micro_batch([row for _, row in rows])
    length_R, prompt_G = np.diff(packed.offsets_R), np.zeros(int(trajectory_R.max()) + 1, np.int32)
    if layout == "packed":
        placement = place(length_R, trajectory_R, 1, BUDGET)
    else:
        order = prefix_order(packed.token_ids_N, packed.offsets_R)
        placement = place_sharing(order, length_R, trajectory_R, prompt_G, 1, BUDGET)
    micros = [micro_batch_of([rows[i][1] for i in chosen], trajectory_R[list(chosen)]) for chosen in placement.ranks[0]]
    return mini_batch_of(micros, len(prompt_G))


def computed_tokens(batch: MiniBatch, shares: bool) -> int:
    """The number of computed tokens."""
    micros = batch.ranks[0]
    shared = [prefix_order(micro.token_ids_N, micro.offsets_R).shared_R.sum() if shares else 0 for micro in micros]
    return sum(len(micro.token_ids_N) for micro in micros) - int(sum(shared))


def main() -> int:
    """Measure and print; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", choices=WORKLOADS, help="only this one")
    parser.add_argument("--one", nargs=2, metavar=("LAYOUT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        layout, folder = options.one
        print(json.dumps(measure(layout, Path(folder), mini_batch(options.workload, layout))))
        return 0
    missed = 0
    print("| rows | tokens / distinct | CPU s a step | faster | memory | loss differs |\n|---|---|---|---|---|---|")
    for workload in [options.workload] if options.workload else WORKLOADS:
        tokens = " / ".join(
            str(computed_tokens(mini_batch(workload, layout), layout != "packed")) for layout in LAYOUTS
        )
        found = compare("benchmarks.shared_prefix", LAYOUTS, options.repeats, "--workload", workload)
        packed, shared = (found[layout] for layout in LAYOUTS)
        faster = packed["seconds"] / shared["seconds"]
        seconds = f"{packed['seconds']:.2f} / {shared['seconds']:.2f}"
        memory = f"{packed['mebibytes']:.0f} / {shared['mebibytes']:.0f} MiB"
        differs = f"{abs(packed['loss'] - shared['loss']):.0e}"
        print(f"| {workload} | {tokens} | {seconds} | {faster:.2f} | {memory} | {differs} |", flush=True)
        missed += faster < WORKLOADS[workload][1]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
