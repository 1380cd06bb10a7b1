"""The values of steps and end records: rewards, stop reasons, roles, routed experts, and the limits of a message.

**Stop reasons** say why a trajectory ended. The stop reason of a *step* comes from the engine instead: there `length`
means that the response was cut at the length limit.

**Roles** decide which steps are trained and which trajectories are compared:

    steps   0 title   1 question   2 its continuation   3 another answer to 1's request   4 a verdict on 2
    roles   aux       main         main                 retry                             verifier

An end record carries the number of each step's role, or nothing if all are `main`. First come the roles of `Role`,
which share the rewards and the baseline of `main`, then the roles that the configuration names, each with rewards
and a baseline of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from service.columns import NO_BYTE

MAX_REWARD = 1e12
"""Largest magnitude of a reward, so that squares and sums of rewards stay finite in float32."""
NEEDED = f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
"""The range of a reward, in words for error messages."""


def is_reward(number: float) -> bool:
    """Whether the magnitude of a reward is at most `MAX_REWARD`; False for NaN."""
    return abs(number) <= MAX_REWARD


class StopReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """The last response was cut at `max_generate_length`; after it the environment or `max_turns` ended the episode."""
    LENGTH = "length"
    """The next prompt would exceed `max_input_length`."""
    MAX_TURNS = "max_turns"
    ABORT = "abort"
    """The engine aborted the request."""
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_OUTPUT = "engine_output"
    """The engine's answer contradicts itself or the request."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENVIRONMENT_REWARD = "environment_reward"
    """The reward was not a number, or its magnitude exceeded `MAX_REWARD`."""
    ENVIRONMENT_OUTPUT = "environment_output"
    """The environment's messages were malformed or too large."""


OVER_LONG = frozenset({StopReason.LENGTH, StopReason.TRUNCATED})
"""Reasons with which a trajectory ends at a length limit."""
FAILURES = frozenset(StopReason) - OVER_LONG - {StopReason.STOP, StopReason.MAX_TURNS}
"""Reasons that the policy did not cause. The attempt is discarded, and the trajectory starts again."""


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


class Routing(NamedTuple):
    """Shape and type of the routed experts that the model can replay; all 0 or empty for a model without experts."""

    layers: tuple[int, ...]
    """The allowed numbers of layers in a record: all layers of the model, or only the layers with experts."""
    topk: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of expert numbers: uint8 if it can hold them all and -1 (`service.columns.widened`), else int16."""
        return np.dtype(np.uint8 if self.experts <= NO_BYTE + (self.topk > 1) else np.int16)

    @property
    def token_bytes(self) -> int:
        """Maximum bytes of the routed experts of one token."""
        return max(self.layers, default=0) * self.topk * self.dtype.itemsize


NO_ROUTING = Routing((), 0, 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the content of a message."""

    vocab_size: int
    max_input_length: int
    max_generate_length: int
    max_turns: int
    n_samples_per_prompt: int
    max_attempts: int
    max_group_bytes: int
    """Maximum bytes of one message (a `StepGroup`)."""
    n_named_roles: int = 0
    """Number of roles that the configuration names."""
    routing: Routing | None = None
    """Shape and type of the routed experts that the model can replay; None if unknown: then records are not checked."""
