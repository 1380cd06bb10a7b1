"""What holds for any episodes: the merge against one that is written for the eye, packing, and counts of tokens.

A token is (the step that carries it, its place there, its id): equal tokens of two steps are different tokens unless
one of the steps refers to them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.columns import digest, widened
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.batches.pack import place
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import merge, merge_steps
from service.handoff.prefixes.sharing import PrefixError, shared_form
from service.handoff.steps.tables import row_objects, steps_table
from service.types import ROUTE_NATIVELY, Extension, Row, Step, TrajectoryId
from tests.pure.handoff.worlds import complete_group, end, shared, step, whole_prompts

SLOW_MACHINE = settings(deadline=None)  # a loaded machine is no failure
MODES = st.sampled_from(["off", "linear", "tree"])
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)  # few ids, so that prefixes agree by chance

Token = tuple[int, int, int]


@dataclass
class PlainRow:
    """A row as lists: of each token its id, log-probability and mask."""

    steps: list[Step]
    prompt_length: int
    tokens: list[tuple[Token, float, bool]] = field(default_factory=list)

    @property
    def ids(self) -> list[Token]:
        return [token for token, *_ in self.tokens]


def ids_of(of: Step) -> list[int]:
    return [*of.prompt_ids.tolist(), *of.response_ids.tolist()]


def written_out(steps: list[Step]) -> list[list[Token]]:
    """The prompt and response of each step, as tokens; steps come by index and may have references."""
    wholes: list[list[Token]] = []
    for now in steps:
        before = [] if now.extends is None else wholes[now.extends.step][: now.extends.length]
        wholes.append(before + [(now.index, place, token) for place, token in enumerate(ids_of(now))])
    return wholes


def same(a: Sequence[object], b: Sequence[object]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def alike(a: Step, b: Step) -> bool:
    return a.temperature == b.temperature and (a.logprobs is None) == (b.logprobs is None)


def outcome(rows: list[PlainRow], steps: list[Step], now: Step, prompt: list[Token], mode: str) -> tuple[str, int, int]:
    """(what becomes of a step, the row that it extends, how many of its tokens are shared)."""
    shared = {r: same(row.ids, prompt) for r, row in enumerate(rows)}
    if mode == "linear":
        shared = {r: length for r, length in shared.items() if r == len(rows) - 1}
    fitting = {r: length for r, length in shared.items() if alike(rows[r].steps[-1], now)}
    whole = {r: length for r, length in fitting.items() if length == len(rows[r].tokens)}
    if whole:
        chosen = max(whole, key=whole.__getitem__)
        return "extended", chosen, whole[chosen]
    forked = any(place >= len(steps[index].prompt_ids) for index, place, _ in prompt)
    return "forked" if forked else "reset", 0, 0


def plain_rows(steps: list[Step], mode: str, counts: Counter[str]) -> list[PlainRow]:
    """The rows of one trajectory, whose steps come by index."""
    rows, wholes = list[PlainRow](), written_out(steps)
    for at, now in enumerate(steps):
        n_prompt = len(wholes[at]) - len(now.response_ids)
        prompt, response = wholes[at][:n_prompt], wholes[at][n_prompt:]
        name, chosen, length = "", 0, 0
        if rows and mode != "off":
            name, chosen, length = outcome(rows, steps, now, prompt, mode)
        if name == "extended":
            row = rows[chosen]
        else:
            row = PlainRow([], len(prompt))
            rows.append(row)
        logprobs = [0.0] * len(response) if now.logprobs is None else now.logprobs.tolist()
        row.tokens += [(token, 0.0, False) for token in prompt[length:]]
        row.tokens += zip(response, logprobs, now.loss_mask.tolist(), strict=True)
        row.steps.append(now)
        if name:
            counts[name] += 1
    return rows


@st.composite
def trees(draw: st.DrawFn, trajectory: TrajectoryId) -> list[Step]:
    """Steps with whole prompts: each goes on from somewhere in an earlier one, with changes, or starts over."""
    steps: list[Step] = []
    for index in range(draw(st.integers(1, 9))):
        prompt: list[int] = []
        if steps and draw(st.integers(0, 5)):
            earlier = ids_of(draw(st.sampled_from([*steps, steps[-1], steps[-1]])))
            cut = draw(st.sampled_from([len(earlier), len(earlier), draw(st.integers(1, len(earlier)))]))
            prompt = earlier[:cut]
            if draw(st.integers(0, 3)) == 0:  # as if tokens had been written another way
                at = draw(st.integers(0, len(prompt) - 1))
                prompt[at : at + draw(st.integers(0, 2))] = draw(st.lists(st.integers(0, 2), max_size=2))
        prompt = prompt + draw(st.lists(st.integers(0, 2), min_size=not prompt, max_size=3))
        made = step(index, prompt, draw(TOKENS), trajectory=trajectory, reward=draw(st.sampled_from([0.0, 0.0, 1.0])))
        made = replace(made, loss_mask=np.array([draw(st.integers(0, 4)) > 0 for _ in made.response_ids], np.bool_))
        if draw(st.integers(0, 5)) == 0:
            made = replace(made, temperature=0.5)
        if draw(st.integers(0, 9)) == 0:
            made = replace(made, logprobs=None)
        steps.append(made)
    return steps


def sent(steps: list[Step], index: int, data: st.DataObject) -> Step:
    """A step as somebody may send it: in full, or extending any earlier step by any length that they share."""
    now = steps[index]
    if not index or not data.draw(st.integers(0, 2)):
        return now
    parent = data.draw(st.integers(0, index - 1))
    shared = same(ids_of(steps[parent]), now.prompt_ids.tolist())
    if not shared:
        return now
    length = data.draw(st.sampled_from([shared, data.draw(st.integers(1, shared))]))
    extends = Extension(parent, length, digest(now.prompt_ids[:length]))
    return replace(now, prompt_ids=now.prompt_ids[length:], extends=extends)


def plain_facts(row: PlainRow) -> dict[str, Any]:
    response = row.tokens[row.prompt_length :]
    return {
        "prompt_ids": [token for *_, token in row.ids[: row.prompt_length]],
        "response_ids": [token for *_, token in row.ids[row.prompt_length :]],
        "logprobs": None if row.steps[0].logprobs is None else [logprob for _, logprob, _ in response],
        "loss_mask": [sampled for *_, sampled in response],
        "reward": row.steps[-1].reward,
        "steps": (row.steps[0].index, row.steps[-1].index),
        "temperature": row.steps[0].temperature,
        "trajectory": row.steps[0].trajectory,
    }


def made_facts(row: Row) -> dict[str, Any]:
    names = ("prompt_ids", "response_ids", "loss_mask")
    return {name: getattr(row, name).tolist() for name in names} | {
        "logprobs": None if row.logprobs is None else row.logprobs.tolist(),
        "steps": (row.first_step, row.last_step),
        "temperature": row.temperature,
        "trajectory": row.trajectory,
        "reward": row.reward,
    }


@SLOW_MACHINE
@given(st.data(), MODES)
def test_any_trees_with_any_references_in_any_order_merge_as_in_the_plain_merge(data: st.DataObject, mode: Any) -> None:
    episodes = [data.draw(trees(TrajectoryId(0, sample))) for sample in range(data.draw(st.integers(1, 2)))]
    counts: Counter[str] = Counter()
    as_sent = [[sent(steps, index, data) for index in range(len(steps))] for steps in episodes]
    plain = [row for steps in as_sent for row in plain_rows(steps, mode, counts)]
    steps = [step for episode in as_sent for step in episode]
    table = steps_table(data.draw(st.permutations(steps)))
    merged = merge(table, mode)
    rows = sorted(row_objects(merged.rows), key=lambda row: (row.trajectory, row.first_step))
    assert [made_facts(row) for row in rows] == [plain_facts(row) for row in plain]
    outcomes = ("extended", "forked", "reset")
    assert {name: merged.counts[name] for name in outcomes} == {name: counts[name] for name in outcomes}


@SLOW_MACHINE
@given(st.data())
def test_each_prompt_is_sent_as_the_longest_prefix_that_an_earlier_step_has(data: st.DataObject) -> None:
    steps = data.draw(trees(TrajectoryId(0, 0)))
    made = sorted(shared_form(data.draw(st.permutations(steps))), key=lambda step: step.index)
    assert steps_table(whole_prompts(made)).token_ids_N.tolist() == steps_table(steps).token_ids_N.tolist()
    for now, before in zip(made, steps, strict=True):
        shared = max((same(ids_of(s), before.prompt_ids.tolist()) for s in steps[: now.index]), default=0)
        assert (now.extends.length if now.extends is not None else 0) == shared
    assert steps_table(shared_form(made)).token_ids_N.tolist() == steps_table(made).token_ids_N.tolist()


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
        made = [data.draw(trees(TrajectoryId(group_id, s))) for s in range(data.draw(st.integers(1, 3)))]
        ends = [end(TrajectoryId(group_id, s), len(e), float(s), f"p{group_id}") for s, e in enumerate(made)]
        steps = [replace(s, logprobs=np.zeros(len(s.response_ids), np.float32)) for episode in made for s in episode]
        sampled += sum(int(s.loss_mask.sum()) for s in steps)
        groups.append(complete_group(steps, ends))
    settings = BatchSettings(ranks=2, token_budget=128, mode=mode, max_staleness=0)
    batch = form_mini_batch(1, groups, VersionHistory(), settings)
    loss = sum(int(m.loss_mask_N.sum()) for rank in batch.ranks for m in rank)
    fates = ("tokens/loss", "tokens/stale", "tokens/untrained", "tokens/masked")
    assert batch.metrics["tokens/sampled"] == sampled == sum(batch.metrics[f] for f in fates)
    assert loss == batch.metrics["tokens/loss"] == batch.loss_tokens_G.sum()
    assert sum(int((m.trajectory_of_row_R >= 0).sum()) for r in batch.ranks for m in r) == batch.rows_G.sum()


# -- by example ------------------------------------------------------------------------------------------------------

EXAMPLE = [
    step(0, [10, 20, 30], [40, 50], reward=0.5),
    step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90], reward=1.0),
]


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_routed_experts_stay_aligned_and_observations_route_natively(dtype: type[np.generic]) -> None:
    steps = [
        replace(s, routed_experts=np.full((len(s.prompt_ids) + len(s.response_ids), 2, 3), s.index, dtype))
        for s in EXAMPLE
    ]
    [row] = merge_steps(steps)
    assert row.routed_experts is not None and row.routed_experts.shape == (9, 2, 3)
    assert row.routed_experts.dtype == dtype
    assert widened(row.routed_experts)[:, 0, 0].tolist() == [0, 0, 0, 0, 0, ROUTE_NATIVELY, ROUTE_NATIVELY, 1, 1]


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"logprobs": None}])
def test_a_step_that_was_sampled_otherwise_begins_a_row_although_its_prompt_goes_on(change: dict[str, Any]) -> None:
    """Rows have one temperature, and log-probabilities for all sampled tokens or for none."""
    first, second = shared([replace(EXAMPLE[0], **change), EXAMPLE[1]])
    assert [(row.first_step, row.last_step) for row in merge_steps([first, second])] == [(0, 0), (1, 1)]


def test_a_reference_to_other_tokens_is_an_error() -> None:
    wrong = replace(shared(EXAMPLE)[1], extends=Extension(0, 5, 12345))
    with pytest.raises(PrefixError, match="step=1 extends other tokens"):
        merge_steps([EXAMPLE[0], wrong])
    with pytest.raises(PrefixError, match="not there"):
        merge_steps([EXAMPLE[0], replace(wrong, extends=Extension(3, 5, 12345))])
