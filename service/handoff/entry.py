"""On entry: a full prompt becomes a reference to the steps before it, once.

    sent     step 1: prompt [10 20 30 40 50 60 70]          response [80 90]
    kept     step 1: extends step 0 by 5 tokens, [60 70]    response [80 90]

So an episode is kept and journalled in O(new tokens), whatever form it came in. A step that goes on from the end of
the one before it is recognised by the running digest of its trajectory; the others are compared with every earlier
step. A step that is there already stays as it came: it will be dropped as a duplicate, or refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from service.handoff.digest import digest, token_bytes
from service.handoff.ledger import Ledger
from service.handoff.prefix import share_prefixes, with_references
from service.handoff.store import Chain, Store, grown
from service.handoff.tables import concat_steps
from service.types import Bools, Extension, StepGroup, Steps, TrajectoryId


def shared(ledger: Ledger, store: Store, message: StepGroup) -> StepGroup:
    """The same message, in which full prompts carry only what no earlier step of their trajectory has."""
    steps = message.steps
    full_K = (steps.extends_K < 0) & (steps.index_K > 0)
    if not full_K.any():
        return message
    wanted_K = full_K & ~_known(ledger, steps, full_K)
    if steps.routed_experts_N is None:  # a digest says nothing about those
        steps = with_references(steps, _continuing(steps, wanted_K, store))
        wanted_K &= steps.extends_K < 0
    if wanted_K.any():
        steps = share_prefixes(steps, _kept(steps, wanted_K, store), wanted_K)
    return replace(message, steps=steps)


def _ids(steps: Steps) -> list[TrajectoryId]:
    columns = (steps.ordinal_K.tolist(), steps.sample_K.tolist(), steps.attempt_K.tolist())
    return [TrajectoryId(*identity) for identity in zip(*columns, strict=True)]


def _known(ledger: Ledger, steps: Steps, full_K: Bools) -> Bools:
    """[K] which steps were accepted before, or came too late."""
    known_K = np.zeros(len(steps), np.bool_)
    ids, indices = _ids(steps), steps.index_K.tolist()
    for k in np.flatnonzero(full_K).tolist():
        group = ledger.state.groups.get(ids[k].ordinal)
        if group is None or ids[k].sample >= len(group.trajectories):
            known_K[k] = True
        else:
            trajectory = group.trajectories[ids[k].sample]
            known_K[k] = ids[k].attempt != trajectory.attempt or indices[k] in trajectory.indices
    return known_K


def _continuing(steps: Steps, wanted_K: Bools, store: Store) -> dict[int, Extension]:
    """Of the wanted steps, what those extend that begin with all tokens of the step before them."""
    items: dict[TrajectoryId, list[int]] = {}
    for k, of in enumerate(_ids(steps)):
        items.setdefault(of, []).append(k)
    found: dict[int, Extension] = {}
    for of, members in items.items():
        if wanted_K[members].any():
            members.sort(key=steps.index_K.__getitem__)
            found |= _continuing_steps(store.chain_of(of.ordinal, of.sample), steps, members, wanted_K)
    return found


def _continuing_steps(chain: Chain | None, steps: Steps, members: list[int], wanted_K: Bools) -> dict[int, Extension]:
    """The same for one trajectory, whose items are sorted by index."""
    found: dict[int, Extension] = {}
    for k in members:
        index, start, stop = int(steps.index_K[k]), int(steps.offsets_K[k]), int(steps.offsets_K[k + 1])
        if chain is not None and index < chain.steps:
            continue
        reference = Extension(int(steps.extends_K[k]), int(steps.extends_length_K[k]), int(steps.extends_digest_K[k]))
        if wanted_K[k] and (whole := _whole_of(chain, steps, k)) is not None:
            found[k] = reference = whole
            start += whole.length
        chain = grown(chain, index, reference, token_bytes(steps.token_ids_N[start:stop]))
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


def _kept(steps: Steps, wanted_K: Bools, store: Store) -> Steps | None:
    """What is kept of the trajectories of the wanted steps."""
    ids = _ids(steps)
    samples = {ids[k][:2] for k in np.flatnonzero(wanted_K).tolist()}
    tables = [table for ordinal, sample in sorted(samples) for table in store.steps_of(ordinal, sample)]
    return concat_steps(tables) if tables else None
