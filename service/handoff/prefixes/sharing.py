"""How a sender makes the references of its steps: each prompt is sent as the longest prefix that an earlier step has.

    whole prompt    step 1: prompt [10 20 30 40 50 60 70]                        response [80 90]
    as it is sent   step 1: prompt (first 5 tokens of step 0) [60 70]            response [80 90]

The reference carries the digest of the tokens [10 20 30 40 50]. Messages, journal and memory hold steps in this form
only: the buffer compares no prompts, and a step without a reference begins a new row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.columns import digest
from service.types import Extension, Int32s, Step, TrajectoryId


def longest_prefix(prompt_ids: Int32s, earlier: Iterable[tuple[int, Int32s]]) -> Extension | None:
    """A reference to the earlier step that shares the longest prefix with a prompt; None if no step shares a token.

    `earlier`: (index, whole prompt and response) of each earlier step, the newest first. Of several equal prefixes the
    newest counts.

    >>> earlier = [(1, np.array([1, 2, 3, 4], np.int32)), (0, np.array([1, 9], np.int32))]
    >>> longest_prefix(np.array([1, 2, 7], np.int32), earlier)[:2]
    (1, 2)
    """
    step, length = -1, 0
    for index, token_ids in earlier:
        if len(token_ids) > length and (shared := common_prefix(token_ids, prompt_ids)) > length:
            step, length = index, shared
    return Extension(step, length, digest(prompt_ids[:length])) if length else None


def shared_form(steps: Sequence[Step]) -> list[Step]:
    """The steps in the form in which they are sent: each whole prompt is replaced by a reference to an earlier step of
    its trajectory, and the tokens after it. Steps may be in any order; steps that have a reference stay as they are.

    >>> def step(index, prompt, response):
    ...     ids = np.array(response, np.int32)
    ...     sampled, versions = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    ...     return Step(TrajectoryId(0, 0), "a", index, np.array(prompt, np.int32), ids, None, sampled, versions)
    >>> [_, second] = shared_form([step(0, [10, 20, 30], [40, 50]), step(1, [10, 20, 30, 40, 50, 60, 70], [80, 90])])
    >>> second.extends[:2], second.prompt_ids.tolist()
    ((0, 5), [60, 70])
    """
    wholes: dict[TrajectoryId, dict[int, Int32s]] = {}
    made = list(steps)
    for place in sorted(range(len(made)), key=lambda place: made[place].index):
        step, prompt_ids = made[place], made[place].prompt_ids
        whole = wholes.setdefault(step.trajectory, {})
        if step.extends is not None:
            before = whole.get(step.extends.step, prompt_ids[:0])[: step.extends.length]
            prompt_ids = np.concatenate((before, prompt_ids))
        elif extends := longest_prefix(prompt_ids, ((i, whole[i]) for i in reversed(whole) if i < step.index)):
            made[place] = after_reference(step, extends)
        whole[step.index] = np.concatenate((prompt_ids, step.response_ids))
    return made


def after_reference(step: Step, extends: Extension) -> Step:
    """The step with the reference `extends`, and without the prompt tokens to which it refers."""
    routed = None if step.routed_experts is None else step.routed_experts[extends.length :]
    return replace(step, prompt_ids=step.prompt_ids[extends.length :], extends=extends, routed_experts=routed)


def common_prefix(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Number of leading items that two sequences share; the time is proportional to this number.

    >>> common_prefix(np.array([1, 2, 3, 4], np.int32), np.array([1, 2, 7], np.int32))
    2
    """
    shorter, start, width = min(len(a), len(b)), 0, 64
    while start < shorter:
        stop = min(start + width, shorter)
        differs = a[start:stop] != b[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, width = stop, 4 * width
    return shorter
