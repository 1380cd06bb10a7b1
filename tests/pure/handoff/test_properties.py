"""What holds for any episodes, however they were cut, ordered, sent and branched."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.pack import place
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import ends_table, steps_table
from service.types import Row, Step, TrajectoryId
from tests.pure.handoff.worlds import end, step

SLOW_MACHINE = settings(deadline=None)  # a loaded machine is no failure

FIRST = TrajectoryId(0, 0)
MODES = st.sampled_from(["off", "linear", "tree"])
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)  # few ids, so that prefixes agree by chance


@st.composite
def episodes(draw: st.DrawFn, trajectory: TrajectoryId = FIRST) -> list[Step]:
    """Steps that continue any earlier step, from anywhere in it, or start over."""
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 6))):
        prompt: list[int] = []
        if steps and draw(st.integers(0, 4)):
            before = steps[draw(st.integers(0, len(steps) - 1))] if draw(st.booleans()) else steps[-1]
            whole = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
            cut = len(whole) if draw(st.integers(0, 2)) else draw(st.integers(1, len(whole)))
            prompt = whole[:cut]
        prompt = prompt + draw(TOKENS if not prompt else st.lists(st.integers(0, 3), max_size=4))
        steps.append(step(index, prompt, draw(TOKENS), trajectory=trajectory, uid=f"p{trajectory.group_id}"))
    return steps


def facts(row: Row) -> dict[str, Any]:
    """A row as plain values."""
    arrays = ("prompt_ids", "response_ids", "loss_mask", "versions", "logprobs")
    rest = ("trajectory", "prompt_uid", "first_step", "last_step", "temperature", "stop_reason", "reward")
    return {a: getattr(row, a).tolist() for a in arrays} | {f: getattr(row, f) for f in rest}


@SLOW_MACHINE
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from(["packed", "padded"]),
)
def test_packing_holds_every_row_once_within_the_budget(rows: list[tuple[int, int]], ranks: int, layout: Any) -> None:
    trajectory_R, length_R = np.array(rows, np.int64).T
    placement = place(length_R, trajectory_R.astype(np.int32), ranks, 100, layout)
    micros = [(r, list(chosen)) for r, rank in enumerate(placement.ranks) for chosen in rank if chosen]
    assert sorted(row for _, chosen in micros for row in chosen) == list(range(len(rows)))
    assert len({len(rank) for rank in placement.ranks}) == 1
    for _, chosen in micros:
        padded = length_R[chosen].max() * len(chosen)
        assert (padded if layout == "padded" else length_R[chosen].sum()) <= 100
    rank_of = {(trajectory_R[row], r) for r, chosen in micros for row in chosen}
    assert len(rank_of) == len(set(trajectory_R.tolist()))


@SLOW_MACHINE
@given(st.data(), MODES)
def test_a_mini_batch_accounts_for_every_sampled_token(data: st.DataObject, mode: Any) -> None:
    groups, sampled = [], 0
    for group_id in range(data.draw(st.integers(1, 3))):
        made = [data.draw(episodes(TrajectoryId(group_id, s))) for s in range(data.draw(st.integers(1, 3)))]
        ends = [end(TrajectoryId(group_id, s), len(e), float(s), f"p{group_id}") for s, e in enumerate(made)]
        steps = [s for episode in made for s in episode]
        sampled += sum(int(s.loss_mask.sum()) for s in steps)
        groups.append(CompleteGroup(group_id, f"p{group_id}", steps_table(steps), ends_table(ends)))
    settings = BatchSettings(ranks=2, token_budget=128, mode=mode, max_staleness=0)
    batch = form_mini_batch(1, groups, VersionHistory(), settings)
    loss = sum(int(m.loss_mask_N.sum()) for rank in batch.ranks for m in rank)
    fates = ("tokens/loss", "tokens/stale", "tokens/untrained", "tokens/masked")
    assert batch.metrics["tokens/sampled"] == sampled == sum(batch.metrics[f] for f in fates)
    assert loss == batch.metrics["tokens/loss"] == batch.loss_tokens_G.sum()
    assert sum(int((m.trajectory_of_row_R >= 0).sum()) for r in batch.ranks for m in r) == batch.rows_G.sum()
