"""The roles of a trajectory's steps, which decide what is trained and which trajectories are compared.

    steps   0 title   1 question   2 its continuation   3 another answer to 1's request   4 a verdict on 2
    roles   aux       main         main                 retry                             verifier

The end record of a trajectory carries one byte for each step: the number of the step's role. The roles of `Role` come
first, then the roles that the configuration names. If an end record carries no roles, every step has the role `main`.

The roles of `Role` share the rewards and the baseline of `main`; a named role has its own rewards and baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum


class Role(StrEnum):
    """The purpose of an agent's call of the policy. In an environment, calls without a named role are `main`."""

    MAIN = "main"
    """The agent's own conversation, even if the agent shortened or summarised it."""
    SUB = "sub"
    """A conversation with a system prompt of its own, by a sub-agent."""
    AUX = "aux"
    """A single question outside the agent's conversation, such as a request for a title."""
    RETRY = "retry"
    """A response that a later response to the same request replaced."""
    UNDELIVERED = "undelivered"
    """A response that no client received."""


ROLES: tuple[str, ...] = tuple(Role)
"""The roles of `Role`, in the order of their numbers on the wire; the configured roles have the next numbers."""
MAX_NAMED = 16
"""Maximum number of roles that a configuration may name."""
TRAINED = (Role.MAIN, Role.SUB)
"""Roles whose steps carry loss, unless `agents.train` and `roles` set others."""


def packed_roles(roles: Iterable[str], named: Sequence[str] = ()) -> bytes:
    """Pack roles into one byte per step; empty if all are `main`. `named`: the roles that the configuration names.

    >>> packed_roles([Role.AUX, Role.MAIN, "verifier"], ["verifier"]), packed_roles([Role.MAIN])
    (b'\\x02\\x00\\x05', b'')
    """
    names = (*ROLES, *named)
    packed = bytes(names.index(role) for role in roles)
    return packed if any(packed) else b""


def roles_from(packed: bytes, n_steps: int, named: Sequence[str] = ()) -> list[str]:
    """Unpack the roles of `n_steps` steps from the bytes that `packed_roles` made."""
    names = (*ROLES, *named)
    return [names[code] for code in packed[:n_steps] or bytes(n_steps)]
