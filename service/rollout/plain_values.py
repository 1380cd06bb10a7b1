"""Copies values that users' code returns into plain types of bounded size.

    a mapping, a list subclass, a numpy number, a str subclass   ->   dict, list, float or int, str (and bool, None)

The value is written as JSON and read again; this bounds its depth and size. Writing it calls methods of its class,
which may raise any error. So all errors are caught.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Real
from typing import Any

import msgspec
import numpy as np

from service.handoff.steps.values import NEEDED, StopReason, is_reward
from service.rollout.chat.tools import MAX_DEPTH, is_shallow
from service.rollout.engine import AgentLimits
from service.rollout.environment import MAIN, Message, StepResult, refuse_other_role
from service.rollout.user_errors import describe_error, type_name

BYTES = (bytes, bytearray, memoryview)
NUMBER_CHARACTERS = 1 << 10
"""Maximum characters of a reward as JSON."""
INFO_CHARACTERS = 1 << 16
"""Maximum characters of one `info` as JSON."""
MAX_ITEMS = 1 << 12
"""Maximum number of values in a mapping or sequence that is no dict, list or tuple. (A user's type may be endless.)"""


class NotAllowed(Exception):
    """Raised if a value that the environment or the agent returned is not allowed."""

    def __init__(self, reason: StopReason, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_step_result(limits: AgentLimits, result: Any) -> StepResult:
    """Check the environment's answer to one turn, and copy it into plain values.

    Raises:
        NotAllowed: the answer is not a `StepResult`, or a part of it is not allowed.
    """
    if not issubclass(type(result), StepResult):
        raise NotAllowed(StopReason.ENVIRONMENT_ERROR, f"returned a {type_name(result)}; a StepResult is needed")
    messages, reward, done, info, history, role, rewards = tuple.__iter__(result)
    ends = _plain("done", done, NUMBER_CHARACTERS, StopReason.ENVIRONMENT_ERROR, int, "true or false")
    return StepResult(
        () if ends else read_messages("messages", limits, messages),
        plain_reward(reward),
        bool(ends),
        plain_info(info),
        None if ends or history is None else read_messages("history", limits, history),
        MAIN if ends else _role("role", limits, role),
        {
            _role("rewards", limits, name): plain_reward(of_role, f"rewards[{name!r:.80}]")
            for name, of_role in plain_info(rewards, "rewards").items()
        },
    )


def read_messages(field: str, limits: AgentLimits, value: Any) -> list[Message]:
    """Check messages and copy them into plain values; each message needs a role, and a text as content. `field`: the
    name of the messages in error messages."""
    most, reason = limits.max_observation_characters, StopReason.ENVIRONMENT_OUTPUT
    messages: list[Message] = _plain(field, value, most, reason, list, "a list of messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise NotAllowed(reason, f"{field}[{i}] needs a role and a text as content")
        try:
            refuse_other_role(message["role"])
        except ValueError as error:
            raise NotAllowed(reason, f"{field}[{i}]: {error}") from None
    return messages


def plain_reward(value: Any, name: str = "reward") -> float:
    """Check a reward, and return it as a float that the buffer accepts. `name`: the reward's name in error messages.

    Raises:
        NotAllowed: the buffer would refuse the value.
    """
    reason = StopReason.ENVIRONMENT_REWARD
    number = value if type(value) is float else _plain(name, value, NUMBER_CHARACTERS, reason)
    if not isinstance(number, int | float) or not is_reward(number):
        raise NotAllowed(reason, f"{name} is {number!r:.80}; {NEEDED} is needed")
    return float(number)


def plain_info(value: Any, field: str = "info") -> dict[str, float]:
    """Check an `info` and return its numbers by name; empty for None. A number that is too large for a float becomes
    NaN. `field`: the mapping's name in error messages.

    Raises:
        NotAllowed: the value is not a mapping from names to numbers, or is too large.
    """
    if value is None:
        return {}
    reason = StopReason.ENVIRONMENT_ERROR
    info = _plain(field, value, INFO_CHARACTERS, reason, dict, "a mapping of names to numbers")
    for name, number in info.items():
        if not isinstance(number, int | float | None):
            raise NotAllowed(reason, f"{field}[{name!r:.80}] is {number!r:.80}; a number is needed")
    return {name: as_float(number) for name, number in info.items()}


def as_float(number: Any) -> float:
    """A number as a float; NaN for None, and for a number that is too large for a float."""
    try:
        return math.nan if number is None else float(number)
    except OverflowError:
        return math.nan


def _role(field: str, limits: AgentLimits, value: Any) -> str:
    name = _plain(field, value, NUMBER_CHARACTERS, StopReason.ENVIRONMENT_ERROR)
    if name not in limits.roles:
        known = ", ".join(limits.roles)
        raise NotAllowed(StopReason.ENVIRONMENT_ERROR, f"{field}: {name!r:.80} is no role of the run ({known})")
    return str(name)


def _plain(
    field: str, value: Any, most: int, reason: StopReason, kind: type | tuple[type, ...] = object, needed: str = ""
) -> Any:
    """A copy of a value. The value must be of the type `kind`, and have at most `most` characters as JSON."""
    try:
        # Unlike msgspec's, Python's JSON refuses bytes, which are no text.
        builtin = msgspec.to_builtins(value, builtin_types=BYTES, str_keys=True, enc_hook=_simpler)
        # A message with NaN would put it into the prompt. An `info` may hold it, and a reward has its own check.
        text = json.dumps(builtin, ensure_ascii=False, allow_nan=reason is not StopReason.ENVIRONMENT_OUTPUT)
        if len(text) > most:
            raise NotAllowed(reason, f"{field} is too large; allowed are {most} characters in all")
        copied = json.loads(text.encode())
    except NotAllowed:
        raise
    except BaseException as error:  # noqa: BLE001 - methods of the value's class may raise anything
        raise NotAllowed(reason, f"{field} cannot be read: {describe_error(error)}") from None
    if not is_shallow(copied):
        raise NotAllowed(reason, f"{field} is nested too deeply; allowed are {MAX_DEPTH} levels")
    if not isinstance(copied, kind):
        raise NotAllowed(reason, f"{field} is {copied!r:.80}; {needed} is needed")
    return copied


def _simpler(value: Any) -> Any:
    """The value in a simpler type that msgspec knows.

    Raises:
        TypeError: there is no such type, or the value has too many items.
    """
    kind = type(value)
    if issubclass(kind, np.generic):
        item = value.item()
        return float(item) if isinstance(item, np.generic) else item
    for base, plain in ((str, str.__str__), (int, int.__int__), (Real, float)):
        if issubclass(kind, base):
            return plain(value)
    if issubclass(kind, Mapping | Sequence):
        items = list(islice(value.items() if issubclass(kind, Mapping) else value, MAX_ITEMS + 1))
        if len(items) > MAX_ITEMS:
            raise TypeError(f"a {type_name(value)} of more than {MAX_ITEMS} values")
        return dict(items) if issubclass(kind, Mapping) else items
    raise TypeError(f"a {type_name(value)}; allowed are texts, numbers, None, lists and mappings")
