"""The advantages of a mini-batch: one a trajectory, or one a turn, where turns or roles differ.

A **part** is what one role did in one trajectory: its turns in order, and its return. Roles that the configuration
names have rewards, groups and baselines of their own; all other steps are the part of `main`:

    turns of a trajectory    main 0   verifier 1   main 0.5         returns: sum     parts  main 0, 0.5   verifier 1
    group of prompt p        the main parts of its trajectories are compared, and the verifier parts are

With `returns: last` a part's return is the reward of its last turn. A trajectory in which a named role had no turn has
no part of that role. The only part of a role in a group has no baseline, and no advantage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from service.columns import lengths_of, offsets_of
from service.handoff.batches.credit import Credit, TurnRewards, credited, in_order_of_ends, turn_rewards
from service.handoff.batches.score import GROUP_ESTIMATORS, NotScored, ReturnRule, advantages, returns
from service.handoff.steps.roles import ROLES, Role
from service.handoff.steps.tables import role_of_steps
from service.types import Ends, Float32s, Float64s, Int32s, Int64s, Steps


class Rule(NamedTuple):
    """How advantages are made of rewards."""

    estimator: str
    returns: ReturnRule = "last"
    credit: Credit = "trajectory"
    gamma: float = 1.0
    named: tuple[str, ...] = ()
    """The roles that the configuration names."""

    @property
    def by_turn(self) -> bool:
        """Whether the turns of a trajectory may have different advantages."""
        return self.credit != "trajectory" or bool(self.named)


class Part(NamedTuple):
    """What one role did in the trajectories of a mini-batch."""

    role: str
    number_V: Int64s
    """The trajectory of each part, by its end's place."""
    return_V: Float64s
    turns: TurnRewards
    place_X: Int64s
    """Where each of the turns stands among those of all roles."""

    def advantages(self, prompt_G: Int32s, rule: Rule) -> Float64s:
        """[X] the advantage of each turn of the role; 0 in a group in which only one trajectory has the role.

        Raises:
            NotScored: one of them is not finite; its trajectories are places of ends.
        """
        group_V, n_turns_V = prompt_G[self.number_V].astype(np.int64), lengths_of(self.turns.first_G)
        try:
            if rule.credit == "trajectory":
                found_X = np.repeat(advantages(rule.estimator, self.return_V, group_V), n_turns_V)
            else:
                found_X = credited(self.turns, group_V, rule.credit, rule.gamma, rule.estimator)
        except NotScored as error:
            raise NotScored(str(error), self.number_V[error.trajectories].tolist()) from error
        if rule.estimator not in GROUP_ESTIMATORS:
            return found_X
        alone_V = np.bincount(group_V)[group_V] == 1  # there is nothing to compare with
        return np.where(np.repeat(alone_V, n_turns_V), 0.0, found_X)


class Advantages(NamedTuple):
    """The advantages of a mini-batch."""

    advantage_G: Float64s
    """By turn: the mean over a trajectory's turns."""
    turn_advantage_X: Float32s | None
    first_turn_G: Int32s
    """Where each trajectory's turns begin on the axis X; empty without advantages by turn."""
    metrics: dict[str, float]


def advantages_of(steps: Steps, ends: Ends, prompt_G: Int32s, rule: Rule) -> Advantages:
    """The advantages of these trajectories; `prompt_G`: the group of each.

    Raises:
        NotScored: one of them is not finite.
    """
    if not rule.by_turn:
        return_G = returns(steps, ends, rule.returns)
        return Advantages(advantages(rule.estimator, return_G, prompt_G), None, np.zeros(0, np.int32), {})
    turns = turn_rewards(steps, ends)
    n_turns_G, advantage_X, metrics = lengths_of(turns.first_G), np.zeros(len(turns.reward_X)), dict[str, float]()
    of_turn_X = np.repeat(np.arange(len(ends)), n_turns_G)
    for part in parts(steps, ends, rule):
        advantage_X[part.place_X] = part.advantages(prompt_G, rule)
        if rule.named:
            metrics |= _role_metrics(part, advantage_X, prompt_G[of_turn_X])
    if rule.credit != "trajectory":
        metrics["reward/scored_turns"] = float(1 - np.isnan(turns.score_X).mean()) if len(advantage_X) else 0.0
        moved_P = np.bincount(prompt_G[of_turn_X], advantage_X != 0, minlength=int(prompt_G.max()) + 1)
        metrics["reward/groups_without_credit"] = float((moved_P == 0).mean())
    mean_G = np.bincount(of_turn_X, advantage_X, minlength=len(ends)) / np.maximum(n_turns_G, 1)
    return Advantages(mean_G, advantage_X.astype(np.float32), turns.first_G[:-1].astype(np.int32), metrics)


def parts(steps: Steps, ends: Ends, rule: Rule) -> Iterator[Part]:
    """The part of each role that had a turn, `main` first and always, then as the configuration names them."""
    turns = turn_rewards(steps, ends)
    ordered, _, order = in_order_of_ends(steps, ends)
    role_X = role_of_steps(ordered, ends)[order]
    of_turn_X = np.repeat(np.arange(len(ends)), lengths_of(turns.first_G))
    for code, role in ((0, str(Role.MAIN)), *enumerate(rule.named, len(ROLES))):
        place_X = np.flatnonzero(role_X < len(ROLES) if code == 0 else role_X == code)
        n_turns_G = np.bincount(of_turn_X[place_X], minlength=len(ends))
        number_V = np.arange(len(ends)) if code == 0 else np.flatnonzero(n_turns_G)
        if not len(number_V):
            continue
        own = TurnRewards(offsets_of(n_turns_G[number_V]), turns.reward_X[place_X], turns.score_X[place_X])
        if code == 0:
            return_V = returns(steps, ends, rule.returns)
        elif rule.returns == "last":
            return_V = own.reward_X[own.first_G[1:] - 1]
        else:
            return_V = np.add.reduceat(own.reward_X, own.first_G[:-1])
        yield Part(role, number_V, return_V, own, place_X)


def teaches(steps: Steps, ends: Ends, rule: Rule, train: Sequence[str]) -> bool:
    """Whether a turn of a trained role of this one group has an advantage: not where all returns are equal."""
    if not rule.by_turn:
        return _vary(returns(steps, ends, rule.returns))
    trained = (part for part in parts(steps, ends, rule) if part.role in train)
    if rule.credit == "trajectory":
        return any(_vary(part.return_V) for part in trained)
    return any(part.advantages(np.zeros(len(ends), np.int32), rule).any() for part in trained)


def _vary(return_V: Float64s) -> bool:
    return bool((return_V != return_V[:1]).any())


def _role_metrics(part: Part, advantage_X: Float64s, prompt_X: Int32s) -> dict[str, float]:
    """What a role got, and how often it spoke, in the trajectories in which it did."""
    moved_P = np.bincount(prompt_X[part.place_X], advantage_X[part.place_X] != 0)
    spoke_P = np.bincount(prompt_X[part.place_X])
    return {
        f"role/{part.role}/reward": float(part.return_V.mean()),
        f"role/{part.role}/turns": len(part.place_X) / len(part.number_V),
        f"role/{part.role}/groups_without_credit": float((moved_P[spoke_P > 0] == 0).mean()) if len(spoke_P) else 0.0,
    }
