"""What a step extends: rebuilding full prompts, checking references, and turning full prompts into references.

step 0  prompt [10 20 30]                  response [40 50]
step 1  prompt [10 20 30 40 50 60 70]      response [80 90]       the full form
step 1  extends step 0 by 5 tokens, prompt [60 70]                the shared form, with the digest of [10 .. 50]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from service.columns import columns_of, lengths_of, offsets_of, segments_of, select, trajectories
from service.handoff.prefixes.digest import token_bytes
from service.handoff.prefixes.history import History, PrefixError, known_history, name_of
from service.handoff.prefixes.prefix_index import Earlier
from service.handoff.steps.step_equality import Tokens, same_step
from service.handoff.steps.tables import items_by_trajectory, trajectory_ids
from service.types import NO_VERSION, Bools, Extension, Int32s, Int64s, Steps, TrajectoryId, Uint64s

CONTEXT_FILL = {"logprobs_N": 0, "loss_mask_N": False, "versions_N": NO_VERSION, "token_rewards_N": 0}
"""What a token has that stands in a row as context only."""


def total_lengths(steps: Steps) -> Int64s:
    """Tokens of each step's whole prompt and response."""
    return np.where(steps.extends_K < 0, np.int64(0), steps.extends_length_K) + lengths_of(steps.offsets_K)


def in_order(steps: Steps) -> tuple[Steps, Int64s]:
    """Steps by trajectory (in order of first appearance), then by index, each once; and each one's trajectory.

    Raises:
        ValueError: one step came twice, and not the same.
    """
    steps, number_K, again_K = _sorted(steps)
    if not again_K.any():
        return steps, number_K
    for k, same in _repetitions(steps, number_K, again_K):
        if not same:
            raise ValueError(f"{name_of(steps, k)} came twice, and not the same")
    return select(steps, np.flatnonzero(~again_K)), number_K[~again_K]


def contradiction(steps: Steps) -> str | None:
    """The first step that came twice and not the same; None also where the steps that would tell are not here."""
    steps, number_K, again_K = _sorted(steps)
    if again_K.any():
        for k, same in _repetitions(steps, number_K, again_K):
            if same is False:
                return f"{name_of(steps, k)} came twice, and not the same"
    return None


def _sorted(steps: Steps) -> tuple[Steps, Int64s, Bools]:
    """Steps by trajectory, then by index, in order of arrival; each one's trajectory, and whether it came before."""
    number_K, _ = trajectories(steps.group_id_K, steps.sample_K, steps.attempt_K)
    again_K = np.zeros(len(steps), np.bool_)
    same_K, next_K = number_K[1:] == number_K[:-1], steps.index_K[1:] > steps.index_K[:-1]
    if not ((next_K | ~same_K).all() and (number_K[1:] >= number_K[:-1]).all()):
        order = np.lexsort((steps.index_K, number_K))
        steps, number_K = select(steps, order), number_K[order]
        again_K[1:] = (np.diff(number_K) == 0) & (np.diff(steps.index_K) == 0)
    return steps, number_K, again_K


def _repetitions(steps: Steps, number_K: Int64s, again_K: Bools) -> Iterator[tuple[int, bool | None]]:
    """Each item that came before, and whether it is the same as then; None where that cannot be told."""
    first_K = np.maximum.accumulate(np.where(again_K, 0, np.arange(len(steps))))

    @lru_cache(maxsize=1)
    def history(number: int) -> History:
        return known_history(steps, np.flatnonzero((number_K == number) & ~again_K).tolist())

    def tokens_of(number: int) -> Tokens:
        return lambda index: history(number).whole(index)

    for k in np.flatnonzero(again_K).tolist():
        yield k, same_step(steps, int(first_K[k]), steps, k, tokens_of(int(number_K[k])))


def check_references(steps: Steps) -> None:
    """Check what each step of one trajectory extends; the steps are sorted by index."""
    first_K = np.zeros(len(steps), np.bool_)
    first_K[:1] = True
    total_K = total_lengths(steps)
    linked = np.array_equal(steps.extends_K[1:], steps.index_K[:-1]) and (steps.extends_K[:1] < 0).all()
    if linked and np.array_equal(steps.extends_length_K[1:], total_K[:-1]):
        check_chain(steps, first_K, np.ones(len(steps), np.bool_))
        return
    history = History(steps)
    for k in range(len(steps)):
        history.add(k)


def check_chain(steps: Steps, first_K: Bools, chain_K: Bools) -> None:
    """Check the references of steps that each continue the one before; every token is read once."""
    view, offsets = token_bytes(steps.token_ids_N), (4 * steps.offsets_K).tolist()
    digests, firsts, chain = steps.extends_digest_K.tolist(), first_K.tolist(), xxhash.xxh3_64()
    for k in np.flatnonzero(chain_K).tolist():
        if firsts[k]:
            chain = xxhash.xxh3_64()
        elif chain.intdigest() != digests[k]:
            raise PrefixError(f"{name_of(steps, k)} extends other tokens than step {steps.extends_K[k]} has")
        chain.update(view[offsets[k] : offsets[k + 1]])


def share_prefixes(steps: Steps, known: Steps | None = None) -> Steps:
    """Let each full-prompt step carry only what the step before it, or else the nearest earlier one, lacks.

    `known` are steps of the same trajectories that came before; what is shared with no earlier step stays full.

    >>> from service.handoff.steps.tables import steps_table
    >>> from service.types import Step
    >>> def step(index, prompt, response):
    ...     ids = np.array(response, np.int32)
    ...     sampled, versions = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    ...     return Step(TrajectoryId(0, 0), "a", index, np.array(prompt, np.int32), ids, None, sampled, versions)
    >>> full = steps_table([step(0, [10, 20, 30], [40, 50]), step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90])])
    >>> small = share_prefixes(full)
    >>> small.extends_K.tolist(), small.extends_length_K.tolist(), small.token_ids_N.tolist()
    ([-1, 0], [0, 5], [10, 20, 30, 40, 50, 60, 70, 80, 90])
    """
    full_K = (steps.extends_K < 0) & (steps.index_K > 0)
    earlier: dict[TrajectoryId, Earlier] = {}
    if known is not None:
        for k, of in enumerate(trajectory_ids(known)):
            earlier.setdefault(of, Earlier()).add(known, k)
    found: dict[int, Extension] = {}
    for of, items in items_by_trajectory(steps).items():
        if full_K[items].any():
            found |= earlier.get(of, Earlier()).references(steps, items, full_K)
    return with_references(steps, found)


def with_references(steps: Steps, found: Mapping[int, Extension]) -> Steps:
    """The same steps, of which these full-prompt ones, by item, carry only what follows their reference."""
    if not found:
        return steps
    items = np.array(list(found), np.int64)
    parent, length, digests = zip(*found.values(), strict=True)
    parent_K, length_K, digest_K = steps.extends_K.copy(), steps.extends_length_K.copy(), steps.extends_digest_K.copy()
    parent_K[items], length_K[items], digest_K[items] = parent, length, np.array(digests, np.uint64)
    skip_K = np.zeros(len(steps), np.int64)
    skip_K[items] = length
    return _without_leading(steps, skip_K, parent_K, length_K, digest_K)


def whole_prompts(steps: Steps) -> Steps:
    """The same steps (by trajectory, then index), each with its whole prompt: the inverse of `share_prefixes`."""
    if not (steps.extends_K >= 0).any():
        return steps
    steps, number_K = in_order(steps)
    history, segments, length_K = History(steps), list[tuple[int, int, bool]](), total_lengths(steps)
    for k in range(len(steps)):
        if k == 0 or number_K[k] != number_K[k - 1]:
            history = History(steps)
        history.add(k)
        own_start = int(steps.offsets_K[k])
        pieces = history.pieces(int(steps.index_K[k]), 0, int(length_K[k]))
        segments += [(*piece, piece.start >= own_start) for piece in pieces]
    start_S, stop_S, live_S = np.array(segments, np.int64).T
    return replace(
        steps,
        prompt_length_K=(steps.prompt_length_K + length_K - lengths_of(steps.offsets_K)).astype(np.int32),
        extends_K=np.full(len(steps), -1, np.int32),
        extends_length_K=np.zeros(len(steps), np.int32),
        extends_digest_K=np.zeros(len(steps), np.uint64),
        offsets_K=offsets_of(length_K),
        **assembled(steps, start_S, stop_S, live_S.astype(np.bool_)),
    )


def assembled(steps: Steps, start_S: Int64s, stop_S: Int64s, live_S: Bools) -> dict[str, Any]:
    """Token columns made of segments; a context segment keeps its ids and routed experts, and carries nothing else."""
    columns = segments_of(steps, start_S, stop_S)
    if not live_S.all():
        context_N = np.repeat(~live_S, stop_S - start_S)
        for name, fill in CONTEXT_FILL.items():
            if (column := columns[name]) is not None:
                columns[name] = np.where(context_N, np.asarray(fill, column.dtype), column)
    return columns


def _without_leading(steps: Steps, skip_K: Int64s, parent_K: Int32s, length_K: Int32s, digest_K: Uint64s) -> Steps:
    start_K, stop_K = steps.offsets_K[:-1] + skip_K, steps.offsets_K[1:]
    columns = assembled(steps, start_K, stop_K, np.ones(len(steps), np.bool_))
    columns |= {column.name: getattr(steps, column.name) for column in columns_of(Steps).items}
    columns |= {
        "prompt_length_K": (steps.prompt_length_K - skip_K).astype(np.int32),
        "extends_K": parent_K,
        "extends_length_K": length_K,
        "extends_digest_K": digest_K,
    }
    for name, array in columns.items():  # a view would keep all that it was cut from in memory
        columns[name] = array if array is None or array.base is None else array.copy()
    return replace(steps, offsets_K=offsets_of(stop_K - start_K), **columns)
