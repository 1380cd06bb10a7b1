"""What earlier steps of a trajectory have of a full prompt.

    taken in   step 0: [1 2 3 4], step 1: [1 2 7]
    asked      step 2: prompt [1 2 3 5]     ->   it extends step 0 by 3 tokens

Steps are taken in as they come, in any order; one that extends a step which is not here yet waits for it. References
are not checked here: a wrong one is found when the trajectory is complete. An answer costs what the prompt costs,
however many steps there are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from service.handoff.prefixes.digest import digest
from service.handoff.prefixes.tree import Place, Tree, common
from service.handoff.steps.tables import routing_of
from service.types import ROUTE_NATIVELY, Bools, Extension, Int16s, Int32s, Steps


class _Taken(NamedTuple):
    """A step that is item `k` of a table."""

    tip: Place
    """Where its whole tokens end."""
    extends: Extension | None
    steps: Steps
    own_start: int
    """Where in the table the tokens begin that follow those which it extends."""


class Earlier:
    """The steps of one trajectory so far."""

    def __init__(self) -> None:
        self.count = 0
        """Steps that were added."""
        self._tree = Tree()
        self._taken: dict[int, _Taken] = {}
        self._waiting: dict[int, list[tuple[Steps, int]]] = {}
        """By the step that they extend."""
        self._routing: tuple[int, ...] | None = None
        """(layers, topk) of routed experts, once some step has any."""

    def add(self, steps: Steps, k: int) -> None:
        """Take in item `k` of a table, and what waited for it."""
        self.count += 1
        coming = [(steps, k)]
        while coming:
            steps, k = coming.pop()
            extends = extension_of(steps, k)
            if extends is not None and extends.step not in self._taken:
                self._waiting.setdefault(extends.step, []).append((steps, k))
            elif self._take(steps, k, extends, int(steps.offsets_K[k])):
                coming += self._waiting.pop(int(steps.index_K[k]), ())

    def references(self, steps: Steps, items: list[int], wanted_K: Bools) -> dict[int, Extension]:
        """What the wanted ones of these items, sorted by index, share with the steps before them.

        The items are also looked for in one another; none of them is here afterwards.
        """
        found: dict[int, Extension] = {}
        tried = list[int]()
        self._tree.try_out()
        for k in items:
            if (index := int(steps.index_K[k])) in self._taken:
                continue
            extends, own_start = extension_of(steps, k), int(steps.offsets_K[k])
            if wanted_K[k] and (reference := self._nearest(steps, k)) is not None:
                found[k] = extends = reference
                own_start += reference.length
            if self._take(steps, k, extends, own_start):
                tried.append(index)
        self._tree.undo()
        for index in tried:
            del self._taken[index]
        return found

    def _take(self, steps: Steps, k: int, extends: Extension | None, own_start: int) -> bool:
        """Take a step in; not if it extends what is not here."""
        place = self._tree.root
        if extends is not None:
            if extends.step not in self._taken or extends.length > self._taken[extends.step].tip.length:
                return False
            place = self._taken[extends.step].tip.before(extends.length)
        own = steps.token_ids_N[own_start : int(steps.offsets_K[k + 1])]
        parted, index = self._tree.follow(place, own), int(steps.index_K[k])
        tip = self._tree.grow(parted, own[parted.length - place.length :], index)
        self._taken[index] = _Taken(tip, extends, steps, own_start)
        self._routing = self._routing or routing_of(steps)
        return True

    def _nearest(self, steps: Steps, k: int) -> Extension | None:
        """The earlier step with which a full prompt shares most; the later step wins a tie."""
        index, start = int(steps.index_K[k]), int(steps.offsets_K[k])
        prompt = steps.token_ids_N[start : start + int(steps.prompt_length_K[k])]
        place = self._reached(index, prompt)
        shared: dict[int, int] = {}
        if (brought := place.brought_below(index)).length:
            shared[brought.owner] = brought.length
        if index - 1 in self._taken:
            shared[index - 1] = common(self._taken[index - 1].tip, place)
        if routing := routing_of(steps) or self._routing:
            here_T = _experts(steps, start, start + len(prompt), routing)
            shared = {step: self._alike_routed(step, length, here_T) for step, length in shared.items()}
        length, step = max(((length, step) for step, length in shared.items()), default=(0, -1))
        return Extension(step, length, digest(prompt[:length])) if length else None

    def _reached(self, index: int, prompt: Int32s) -> Place:
        """How far the steps so far have a prompt; what the step before it extends is recognised by its digest."""
        before = self._taken.get(index - 1)
        place = self._tree.root
        if before is not None and before.extends is not None and before.extends.length <= len(prompt):
            length = before.extends.length
            if digest(prompt[:length]) == before.extends.digest:
                place = before.tip.before(length)
        return self._tree.follow(place, prompt[place.length :])

    def _alike_routed(self, step: int, length: int, here_T: Int16s) -> int:
        """Of shared tokens, how many leading ones have the same routed experts, so that a reference loses nothing."""
        stop, alike = length, length
        while stop:
            taken = self._taken[step]
            cut = 0 if taken.extends is None else taken.extends.length
            if cut < stop:
                there_T = _experts(taken.steps, taken.own_start, taken.own_start + stop - cut, here_T.shape[1:])
                if there_T.shape[1:] != here_T.shape[1:]:
                    return 0  # the message will be refused for that
                if (differs_T := (there_T != here_T[cut:stop]).any(axis=(1, 2))).any():
                    alike = cut + int(differs_T.argmax())
                stop = cut
            step = -1 if taken.extends is None else taken.extends.step
        return alike


def extension_of(steps: Steps, k: int) -> Extension | None:
    """What item `k` extends; None: it has its whole prompt."""
    if steps.extends_K[k] < 0:
        return None
    return Extension(int(steps.extends_K[k]), int(steps.extends_length_K[k]), int(steps.extends_digest_K[k]))


def _experts(steps: Steps, start: int, stop: int, routing: tuple[int, ...]) -> Int16s:
    """Routed experts of tokens; of a table without any, none."""
    if steps.routed_experts_N is None:
        return np.full((stop - start, *routing), ROUTE_NATIVELY, np.int16)
    return steps.routed_experts_N[start:stop]
