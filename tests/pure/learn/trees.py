"""Random rows that begin alike: shared prompts, forks at any depth, identical rows, prefixes, empty responses."""

from dataclasses import replace

import numpy as np

from tests.pure.learn.builders import MadeRow, made_row


def tree_rows(seed: int, trajectories: int = 5, most: int = 12) -> list[MadeRow]:
    """One to three rows a trajectory, in random order; each begins like an earlier one, or not."""
    rng = np.random.default_rng(seed)
    rows: list[MadeRow] = []
    for trajectory in range(trajectories):
        for _ in range(int(rng.integers(1, 4))):
            rows.append(_next_row(trajectory, rows, rng, most))
    return [rows[i] for i in rng.permutation(len(rows))]


def _next_row(trajectory: int, rows: list[MadeRow], rng: np.random.Generator, most: int) -> MadeRow:
    new = made_row(trajectory, int(rng.integers(2, most)), rng)
    kind = rng.choice(["new", "fork", "fork", "fork", "identical", "longer", "prompt only"]) if rows else "new"
    if kind == "new":
        return new
    old = rows[int(rng.integers(len(rows)))]
    shared = int(rng.integers(1, len(old.token_ids) + 1))
    if kind == "identical":
        return replace(old, trajectory=trajectory, temperature=new.temperature)
    if kind == "prompt only":
        nothing = np.zeros(shared, bool)
        unsampled = np.full(shared, -1, np.int32)
        return MadeRow(trajectory, old.token_ids[:shared], nothing, nothing.astype(np.float32), unsampled)
    shared = len(old.token_ids) if kind == "longer" else shared
    keep = bool(rng.random() < 0.5)  # whether the shared part carries loss here too

    def joined(name: str, fill: float) -> np.ndarray:
        first = getattr(old, name)[:shared]
        return np.concatenate([first if keep or name == "token_ids" else np.full_like(first, fill), getattr(new, name)])

    mask = joined("loss_mask", False)
    values = (joined("token_ids", 0), mask, joined("logprobs", 0), joined("staleness", -1))
    return MadeRow(trajectory, *values, new.temperature)
