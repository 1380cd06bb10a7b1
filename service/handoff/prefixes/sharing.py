"""Prefix sharing: replaces full prompts by references to earlier steps, and checks references.

    full form      step 1: prompt [10 20 30 40 50 60 70]                        response [80 90]
    shared form    step 1: prompt (first 5 tokens of step 0) [60 70]            response [80 90]

The reference carries the digest of the tokens [10 20 30 40 50]. A step may be sent in either form; it is kept and
journalled in shared form, so memory and journal grow with the new tokens only. A step that continues the whole step
before it, as steps of environments and of most agents do, is recognised by the running digest of its trajectory
(`Chain`); any other full prompt is looked up among all earlier steps (`PrefixIndex`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import xxhash

from service.columns import columns_of, digest, offsets_of, segments_of, token_bytes, trajectories
from service.handoff.prefixes.prefix_index import PrefixIndex
from service.handoff.steps.tables import NO_EXTENSION, extension_of
from service.types import Bools, Extension, Steps, TrajectoryId


class Chain(NamedTuple):
    """Steps 0 to `steps` - 1 of a trajectory, each of which has a full prompt or extends the whole step before it."""

    steps: int
    length: int
    """Number of tokens in the whole prompt and response of the last step."""
    tokens: xxhash.xxh3_64
    """The running digest of the last step's prompt and response."""

    @property
    def extension(self) -> Extension:
        """The reference of a next step that extends the whole last step of the chain."""
        return Extension(self.steps - 1, self.length, self.tokens.intdigest())


def grown(chain: Chain | None, index: int, extends: Extension, own: memoryview) -> Chain | None:
    """The chain with one more step; None if the step is not the next one, or extends anything but the whole step before
    it. `own`: the bytes of the tokens that the step itself carries."""
    if index != (0 if chain is None else chain.steps):
        return None
    if extends.step < 0:
        tokens, length = xxhash.xxh3_64(), 0
    elif chain is not None and extends == chain.extension:
        tokens, length = chain.tokens.copy(), chain.length
    else:
        return None
    tokens.update(own)
    return Chain(index + 1, length + len(own) // 4, tokens)


def dedupe_prefixes(
    steps: Steps,
    wanted_K: Bools,
    chain_of: Callable[[TrajectoryId], Chain | None],
    index_of: Callable[[TrajectoryId], PrefixIndex],
) -> Steps:
    """The table of steps, in which each step in `wanted_K` carries only the tokens that no earlier step of its
    trajectory has.

    `chain_of`, `index_of`: return a trajectory's known earlier steps. Steps with values for their prompt tokens, such
    as routed experts, are not changed: a reference to equal token ids would lose those values.

    >>> from service.handoff.steps.builder import steps_table
    >>> from service.types import Step
    >>> def step(index, prompt, response):
    ...     ids = np.array(response, np.int32)
    ...     sampled, versions = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    ...     return Step(TrajectoryId(0, 0), "a", index, np.array(prompt, np.int32), ids, None, sampled, versions)
    >>> full = steps_table([step(0, [10, 20, 30], [40, 50]), step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90])])
    >>> small = dedupe_prefixes(full, full.index_K > 0, lambda of: None, lambda of: PrefixIndex())
    >>> small.extends_K.tolist(), small.extends_length_K.tolist(), small.token_ids_N.tolist()
    ([-1, 0], [0, 5], [10, 20, 30, 40, 50, 60, 70, 80, 90])
    """
    of_prompts = [column for column in columns_of(Steps).tokens if column.about.on_prompt and column.optional]
    if not wanted_K.any() or any(getattr(steps, column.name) is not None for column in of_prompts):
        return steps
    found: dict[int, Extension] = {}
    number_K, _ = trajectories(steps.group_id_K, steps.sample_K, steps.attempt_K)
    order, columns = np.lexsort((steps.index_K, number_K)), (steps.group_id_K, steps.sample_K, steps.attempt_K)
    for items in np.split(order, np.flatnonzero(np.diff(number_K[order])) + 1):
        if wanted_K[items].any():
            of = TrajectoryId(*(int(column[items[0]]) for column in columns))
            items = items.tolist()
            continuing = _continuing(chain_of(of), steps, items, wanted_K)
            if all(k in continuing for k in items if wanted_K[k]):
                found |= continuing
            else:
                found |= index_of(of).references(steps, items, wanted_K, continuing)
    return with_references(steps, found)


def with_references(steps: Steps, found: Mapping[int, Extension]) -> Steps:
    """The table of steps, in which each step in `found` (by position) has the reference given there, and carries only
    the tokens after the prefix to which it refers."""
    if not found:
        return steps
    items = np.array(list(found), np.int64)
    parent, length, digests = zip(*found.values(), strict=True)
    arrays = {column.name: getattr(steps, column.name) for column in columns_of(Steps).items}
    columns: dict[str, Any] = {name: None if array is None else array.copy() for name, array in arrays.items()}
    columns["extends_K"][items], columns["extends_length_K"][items] = parent, length
    columns["extends_digest_K"][items] = np.array(digests, np.uint64)
    columns["prompt_length_K"][items] -= np.array(length, np.int32)
    start_K, stop_K = steps.offsets_K[:-1].copy(), steps.offsets_K[1:]
    start_K[items] += length
    columns |= segments_of(steps, start_K, stop_K, copy=True)  # a view would keep the whole message in memory
    return replace(steps, offsets_K=offsets_of(stop_K - start_K), **columns)


def _continuing(chain: Chain | None, steps: Steps, items: list[int], wanted_K: Bools) -> dict[int, Extension]:
    """References of a trajectory's wanted steps, up to the first step that does not continue the whole step before
    it."""
    found: dict[int, Extension] = {}
    for k in items:
        index, start, stop = int(steps.index_K[k]), int(steps.offsets_K[k]), int(steps.offsets_K[k + 1])
        if chain is not None and index < chain.steps:
            continue
        extends = extension_of(steps, k) or NO_EXTENSION
        if wanted_K[k]:
            if chain is None or chain.length > steps.prompt_length_K[k]:
                break
            if digest(steps.token_ids_N[start : start + chain.length]) != chain.extension.digest:
                break
            found[k] = extends = chain.extension
            start += chain.length
        chain = grown(chain, index, extends, token_bytes(steps.token_ids_N[start:stop]))
        if chain is None:
            break
    return found
