"""What holds for any episodes, however they were cut, ordered, sent and branched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from service.columns import select
from service.handoff.batches.advantages import advantages
from service.handoff.batches.batch import BatchSettings, form_mini_batch, mini_batch_boundaries
from service.handoff.batches.pack import partition, place
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.versions import VersionHistory
from service.handoff.prefixes.merge import merge, merge_steps
from service.handoff.prefixes.sharing import share_prefixes
from service.handoff.steps.builder import step_group, steps_table
from service.handoff.steps.tables import concat_steps, ends_table, row_objects
from service.handoff.steps.wire import decode, encode
from service.handoff.validate import refusal
from service.types import Row, Step, StepGroup, TrajectoryId
from tests.pure.handoff.worlds import LIMITS, SENDER, end, step

SLOW_MACHINE = settings(deadline=None)  # a loaded machine is no failure

FIRST = TrajectoryId(0, 0)
MODES = st.sampled_from(["off", "linear", "tree"])
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)  # few ids, so that prefixes agree by chance


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[int], list[bool]]:
    """A finished token stream: a prompt, then what the policy sampled and what it observed."""
    prompt = draw(TOKENS)
    parts = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=30))
    mask = [False] * len(prompt) + [sampled for sampled, _ in parts] + [True]
    return prompt + [token for _, token in parts] + [7], mask


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
    arrays = ("prompt_ids", "response_ids", "loss_mask", "versions", "rewards", "logprobs")
    rest = ("trajectory", "prompt_uid", "first_step", "last_step", "temperature", "stop_reason", "reward")
    return {a: getattr(row, a).tolist() for a in arrays} | {f: getattr(row, f) for f in rest}


@SLOW_MACHINE
@given(streams(), st.data())
def test_splitting_a_stream_into_any_steps_and_merging_gives_it_back(
    stream: tuple[list[int], list[bool]], data: st.DataObject
) -> None:
    tokens, mask = stream
    starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    cuts = {i for i in starts[1:] if data.draw(st.booleans())} | {starts[0]}
    steps = []
    for index, start in enumerate(sorted(cuts)):
        later = [i for i in sorted(cuts) if i > start]
        stop = max(i for i in range(start, later[0] if later else len(mask)) if mask[i]) + 1
        made = step(index, tokens[:start], tokens[start:stop])
        sampled = np.array(mask[start:stop])
        steps.append(replace(made, loss_mask=sampled, versions=np.where(sampled, 0, -1)))
    [row] = merge_steps(steps)
    assert [*row.prompt_ids, *row.response_ids] == tokens
    assert [False] * len(row.prompt_ids) + row.loss_mask.tolist() == mask


def merge_rows(table: Any, mode: Any) -> list[Row]:
    return row_objects(merge(table, mode).rows)


@SLOW_MACHINE
@given(episodes(), st.data())
def test_sharing_works_across_messages_in_any_order_of_entry(steps: list[Step], data: st.DataObject) -> None:
    full = steps_table(steps)
    known = None
    for k in data.draw(st.permutations(range(len(steps)))):
        message = share_prefixes(select(full, np.array([k])), known)
        known = message if known is None else concat_steps([known, message])
    assert known is not None
    assert [facts(r) for r in merge_rows(known, "tree")] == [facts(r) for r in merge_rows(full, "tree")]


@SLOW_MACHINE
@given(st.binary(max_size=300))
def test_no_bytes_make_the_decoder_raise(data: bytes) -> None:
    for candidate in (data, encode(step_group(SENDER, [], [end()]))[: len(data)] + data):
        found = decode(candidate, LIMITS)
        assert not isinstance(found, StepGroup) or refusal(found, LIMITS) is None


@SLOW_MACHINE
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90)), min_size=1, max_size=40), st.integers(1, 5))
def test_packing_holds_every_row_once_within_the_budget(rows: list[tuple[int, int]], ranks: int) -> None:
    trajectory_R, length_R = np.array(rows, np.int64).T
    budget = 100
    placement = place(length_R, trajectory_R.astype(np.int32), ranks, budget)
    held = [row for rank in placement.ranks for chosen in rank for row in chosen]
    assert sorted(held) == list(range(len(rows)))
    assert len({len(rank) for rank in placement.ranks}) == 1
    assert all(length_R[list(chosen)].sum() <= budget for rank in placement.ranks for chosen in rank)
    for trajectory in set(trajectory_R.tolist()):
        assert (
            len({r for r, rank in enumerate(placement.ranks) for c in rank for x in c if trajectory_R[x] == trajectory})
            == 1
        )


@SLOW_MACHINE
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 90)), min_size=1, max_size=40), st.integers(1, 3))
def test_padded_micro_batches_count_their_padding(rows: list[tuple[int, int]], ranks: int) -> None:
    trajectory_R, length_R = np.array(rows, np.int64).T
    placement = place(length_R, trajectory_R.astype(np.int32), ranks, 100, "padded")
    for rank in placement.ranks:
        for chosen in rank:
            assert not chosen or length_R[list(chosen)].max() * len(chosen) <= 100
    assert sorted(row for rank in placement.ranks for chosen in rank for row in chosen) == list(range(len(rows)))


@SLOW_MACHINE
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_the_heaviest_part_is_within_the_greedy_bound(costs: list[int], parts: int) -> None:
    cost_G = np.array(costs, np.int64)
    part_G = partition(cost_G, parts)
    heaviest = np.bincount(part_G, cost_G, minlength=parts).max()
    assert (
        heaviest <= (4 / 3) * max(cost_G.sum() / parts, cost_G.max()) + 1e-9
        or heaviest <= cost_G.sum() / parts + cost_G.max()
    )


@SLOW_MACHINE
@given(st.lists(st.integers(1, 4), min_size=2, max_size=12), st.sampled_from([1, 2, 3]))
def test_boundaries_partition_prompts(samples: list[int], size: int) -> None:
    samples = samples[: len(samples) // size * size]
    steps = [
        step(0, [1], [2], trajectory=TrajectoryId(o, s), uid=f"p{o}")
        for o, count in enumerate(samples)
        for s in range(count)
    ]
    rows = merge_steps(steps)
    bounds = mini_batch_boundaries(rows, size)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(len(rows)))
    assert all(len({row.prompt_uid for row in rows[start:stop]}) == size for start, stop in bounds)


@SLOW_MACHINE
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30),
    st.sampled_from(["grpo", "grpo_no_std", "rloo"]),
    st.data(),
)
def test_advantages_sum_to_zero_per_group(returns_G: list[float], name: str, data: st.DataObject) -> None:
    uids = [data.draw(st.sampled_from("abc")) for _ in returns_G]
    scores = advantages(name, returns_G, uids)
    for uid in set(uids):
        mine = [score for score, u in zip(scores, uids, strict=True) if u == uid]
        assert len(mine) == 1 or abs(sum(mine)) <= 1e-9 * max(1.0, *map(abs, mine), *map(abs, returns_G)) * len(mine)


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
