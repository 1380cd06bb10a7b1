"""On entry: a full prompt becomes a reference to the steps before it, once.

    sent     step 1: prompt [10 20 30 40 50 60 70]          response [80 90]
    kept     step 1: extends step 0 by 5 tokens, [60 70]    response [80 90]

So an episode is kept and journalled in O(new tokens), whatever form it came in. A step that goes on from the end of
the one before it is recognised by the running digest of its trajectory; others are looked up among all earlier steps,
which the store keeps ready for that. A step that is there already stays as it came: it will be dropped as a duplicate,
or refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.handoff.ledger.ledger import Ledger
from service.handoff.ledger.store import Chain, Store, grown
from service.handoff.prefixes.digest import digest, token_bytes
from service.handoff.prefixes.prefix_index import extension_of
from service.handoff.prefixes.references import with_references
from service.handoff.steps.tables import items_by_trajectory, trajectory_ids
from service.types import Bools, Extension, StepGroup, Steps


def shared(ledger: Ledger, store: Store, message: StepGroup) -> StepGroup:
    """The same message, in which full prompts carry only what no earlier step of their trajectory has."""
    steps = message.steps
    full_K = (steps.extends_K < 0) & (steps.index_K > 0)
    if not full_K.any():
        return message
    wanted_K = full_K & ~_known(ledger, steps, full_K)
    routed = steps.routed_experts_N is not None or ledger.state.routing is not None  # a digest says nothing about those
    found: dict[int, Extension] = {}
    for of, items in items_by_trajectory(steps).items():
        if wanted_K[items].any():
            if not routed:
                found |= _continuing(store.chain_of(of.group_id, of.sample), steps, items, wanted_K)
            if not all(k in found for k in items if wanted_K[k]):
                found |= store.earlier_than(of.group_id, of.sample).references(steps, items, wanted_K)
    return replace(message, steps=with_references(steps, found))


def _known(ledger: Ledger, steps: Steps, full_K: Bools) -> Bools:
    """[K] which steps were accepted before, or came too late."""
    known_K = np.zeros(len(steps), np.bool_)
    ids, indices = trajectory_ids(steps), steps.index_K.tolist()
    for k in np.flatnonzero(full_K).tolist():
        group = ledger.state.groups.get(ids[k].group_id)
        if group is None or ids[k].sample >= len(group.trajectories):
            known_K[k] = True
        else:
            trajectory = group.trajectories[ids[k].sample]
            known_K[k] = ids[k].attempt != trajectory.attempt or indices[k] in trajectory.indices
    return known_K


def _continuing(chain: Chain | None, steps: Steps, items: list[int], wanted_K: Bools) -> dict[int, Extension]:
    """Of a trajectory's wanted steps, what those extend that begin with all tokens of the step before them."""
    found: dict[int, Extension] = {}
    for k in items:
        index, start, stop = int(steps.index_K[k]), int(steps.offsets_K[k]), int(steps.offsets_K[k + 1])
        if chain is not None and index < chain.steps:
            continue
        reference = extension_of(steps, k)
        if wanted_K[k] and (whole := _whole_of(chain, steps, k)) is not None:
            found[k] = reference = whole
            start += whole.length
        chain = grown(chain, index, reference or Extension(-1, 0, 0), token_bytes(steps.token_ids_N[start:stop]))
        if chain is None:
            break
    return found


def _whole_of(chain: Chain | None, steps: Steps, k: int) -> Extension | None:
    """The reference of a full-prompt step to the whole of the step before it, if it begins with that."""
    if chain is None or chain.length > steps.prompt_length_K[k]:
        return None
    start, before = int(steps.offsets_K[k]), chain.tokens.intdigest()
    if digest(steps.token_ids_N[start : start + chain.length]) != before:
        return None
    return Extension(chain.steps - 1, chain.length, before)
