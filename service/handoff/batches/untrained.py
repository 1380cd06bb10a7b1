"""Steps whose roles are not trained: their tokens lose their loss, and are counted by fate.

    trajectory   step 0 aux [7 8]   step 1 main [1 2 3]   step 2 main, after step 1 [4]
    loss                 0 0                1 1 1                                   1      2 tokens of the fate `aux`

The tokens stay: later steps may continue them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from service.columns import Int32s, lengths_of
from service.handoff.ledger.lifecycle import Fate
from service.handoff.steps.roles import ROLES
from service.handoff.steps.tables import end_of_items, role_of_steps
from service.types import Ends, Steps


def without_untrained(
    steps: Steps, ends: Ends, prompt_G: Int32s, train: Sequence[str], named: Sequence[str] = ()
) -> tuple[Steps, tuple[dict[Fate, int], ...]]:
    """The steps, without loss where their roles are not among `train`; and the tokens of each group that lost it.

    `prompt_G`: the group of each end; `named`: the roles that the configuration names.
    """
    role_K = role_of_steps(steps, ends)
    untrained_K = ~np.isin(role_K, [code for code, role in enumerate((*ROLES, *named)) if role in train])
    counts: tuple[dict[Fate, int], ...] = tuple({} for _ in range(int(prompt_G.max(initial=-1)) + 1))
    if not untrained_K.any():
        return steps, counts
    prompt_K, offsets = prompt_G[end_of_items(steps, ends)], steps.offsets_K.tolist()
    for k in np.flatnonzero(untrained_K).tolist():
        # Of the named roles only a judge has tokens that the policy sampled and is not trained on.
        fate = Fate(ROLES[role_K[k]]) if role_K[k] < len(ROLES) else Fate.JUDGE
        of_group = counts[prompt_K[k]]
        sampled = int(np.count_nonzero(steps.loss_mask_N[offsets[k] : offsets[k + 1]]))
        of_group[fate] = of_group.get(fate, 0) + sampled
    mask_N = steps.loss_mask_N & ~np.repeat(untrained_K, lengths_of(steps.offsets_K))
    return replace(steps, loss_mask_N=mask_N), counts
