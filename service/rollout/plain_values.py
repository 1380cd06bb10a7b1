"""Copies values that users' code returns into plain types, with bounded depth and size.

    a mapping, a list subclass, a numpy number, a str subclass   ->   dict, list, float or int, str (and bool, None)

To copy a value, methods of its class are called; these may raise any error, so the caller has to handle all errors. The
finished copy contains only plain types.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from service.handoff.steps.reward import NEEDED, is_reward
from service.handoff.steps.stop_reason import StopReason
from service.rollout.environment import MAIN, Message, StepResult, is_text
from service.rollout.limits import AgentLimits
from service.rollout.user_errors import describe_error, type_name

MAX_DEPTH = 64
"""Maximum number of nested lists and mappings around a value."""
MAX_PLACE_CHARACTERS = 200
"""Maximum characters of a value's path (such as `['hits'][1]`) in an error message."""
VALUE_CHARACTERS = 8
"""Characters that a number or other value without text counts as, so that the number of such values is limited, too."""
NUMBER_CHARACTERS = 1 << 10
"""Maximum characters of a reward as text."""
INFO_CHARACTERS = 1 << 16
"""Maximum characters of all names and values in one `info` together."""


class NotPlain(Exception):
    """Raised if a value is not allowed; the message states the path of the value and which values are allowed."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem, self.place = problem, ""

    def __str__(self) -> str:
        return f"{self.place} {self.problem}"


class Copier:
    """Copies values into plain types. All texts of a value, including the names in mappings, may have at most `most`
    characters together.

    Values of the types in `also` are passed on without a copy. With `any_text`, texts may contain half of a surrogate
    pair.

    >>> Copier(1000).copy({"hits": (np.float32(0.5), None)})
    {'hits': [0.5, None]}
    >>> Copier(1000).copy({"hits": [1, {2, 3}]})
    Traceback (most recent call last):
    service.rollout.plain_values.NotPlain: ['hits'][1] is a set; allowed are texts, numbers, None, lists and mappings
    """

    def __init__(self, most: int, also: tuple[type, ...] = (), any_text: bool = False) -> None:
        self._most = self._left = most
        self._also = also
        self._any_text = any_text
        self._depth = 0

    def copy(self, value: Any) -> Any:
        """A plain copy of the value.

        Raises:
            NotPlain: the value has another type, is not a valid text, is nested too deeply or is too large.
        """
        kind = type(value)  # `isinstance` would run code of the value's class
        if issubclass(kind, str):
            return self._text(value)
        self._count(VALUE_CHARACTERS)
        if value is None or kind is bool or issubclass(kind, self._also):
            return value
        if kind is dict or issubclass(kind, Mapping):
            return dict(self._inside(value.items(), has_names=True))
        if kind is list or (issubclass(kind, Sequence) and not issubclass(kind, bytes | bytearray | memoryview)):
            return [item for _, item in self._inside(enumerate(value), has_names=False)]
        if issubclass(kind, int):
            number = int.__int__(value)
            self._count(number.bit_length() // 3)
            return number
        if issubclass(kind, np.generic):
            item = value.item()
            return float(item) if isinstance(item, np.generic) else self.copy(item)
        if issubclass(kind, Real):
            return float(value)
        raise NotPlain(f"is a {type_name(value)}; allowed are texts, numbers, None, lists and mappings")

    def _inside(self, items: Iterable[tuple[Any, Any]], has_names: bool) -> list[tuple[Any, Any]]:
        """The (name or index, copy) of each value in a container."""
        if self._depth == MAX_DEPTH:
            raise NotPlain(f"is nested too deeply; allowed are {MAX_DEPTH} levels")
        self._depth += 1
        copied = []
        for key, item in items:
            place = self._name(key) if has_names else key
            try:
                copied.append((place, self.copy(item)))
            except NotPlain as refused:
                refused.place = f"[{place!r:.80}]{refused.place[:MAX_PLACE_CHARACTERS]}"
                raise
        self._depth -= 1
        return copied

    def _name(self, key: object) -> str:
        """A name as text; names that are numbers become texts, as in JSON."""
        try:
            name = self.copy(key)
        except NotPlain as refused:
            raise NotPlain(f"has a name that {refused.problem}") from None
        if isinstance(name, list | dict):
            raise NotPlain(f"has a name that is a {type_name(key)}; allowed are texts and numbers")
        return str(name)

    def _text(self, value: object) -> str:
        text = str.__str__(value)
        self._count(len(text))
        if not (self._any_text or text.isascii() or is_text(text)):
            raise NotPlain("holds half a surrogate pair; allowed is text that UTF-8 can encode")
        return text

    def _count(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise NotPlain(f"is too large; allowed are {self._most} characters in all")


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
    return messages


def plain_reward(value: Any, name: str = "reward") -> float:
    """Check a reward and return it as a float that the buffer accepts. `name`: the value's name in error messages.

    Raises:
        NotAllowed: the value is not such a number.
    """
    reason = StopReason.ENVIRONMENT_REWARD
    number = _plain(name, value, NUMBER_CHARACTERS, reason, (int, float), NEEDED)
    if not is_reward(number):
        raise NotAllowed(reason, f"{name} is {number!r:.80}; {NEEDED} is needed")
    return float(number)


def plain_info(value: Any, field: str = "info") -> dict[str, float]:
    """Check an `info` and return its numbers by name; empty for None. `field`: the mapping's name in error messages.

    Raises:
        NotAllowed: the value is not such a mapping, or too large.
    """
    if value is None:
        return {}
    reason = StopReason.ENVIRONMENT_ERROR
    info = _plain(field, value, INFO_CHARACTERS, reason, dict, "a mapping of names to numbers")
    for name, number in info.items():
        if not isinstance(number, int | float):
            raise NotAllowed(reason, f"{field}[{name!r:.80}] is {number!r:.80}; a number is needed")
    return {name: float_or_nan(number) for name, number in info.items()}


def float_or_nan(number: float) -> float:
    """The number as a float; NaN if it is infinite, NaN, or too large for a float."""
    try:
        return float(number) if math.isfinite(number) else math.nan
    except OverflowError:
        return math.nan


def _role(field: str, limits: AgentLimits, value: Any) -> str:
    name = _plain(field, value, NUMBER_CHARACTERS, StopReason.ENVIRONMENT_ERROR)
    if name not in limits.roles:
        known = ", ".join(limits.roles)
        raise NotAllowed(StopReason.ENVIRONMENT_ERROR, f"{field}: {name!r:.80} is no role of the run ({known})")
    return str(name)


def _plain(
    field: str,
    value: Any,
    most: int,
    reason: StopReason,
    kind: type | tuple[type, ...] = object,
    needed: str = "",
) -> Any:
    """A copy of a value that must be of the given kind, with up to `most` characters."""
    try:
        copied = Copier(most).copy(value)
    except NotPlain as refused:
        raise NotAllowed(reason, f"{field}{refused}") from None
    except BaseException as error:  # noqa: BLE001 - the copy runs methods of the value's class, which may raise anything
        raise NotAllowed(reason, f"{field} cannot be read: {describe_error(error)}") from None
    if not isinstance(copied, kind):
        raise NotAllowed(reason, f"{field} is {copied!r:.80}; {needed} is needed")
    return copied
