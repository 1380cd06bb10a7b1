"""Copies of values that users' code made, out of plain types only, with bounded depth and size.

    a mapping, a list subclass, a numpy number, a str subclass   ->   dict, list, float or int, str (and bool, None)

A copy runs methods of the values' own classes, which may raise anything: the caller guards it. The finished copy holds
nothing of these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from service.rollout.environment import is_text
from service.rollout.traceback import type_name

MAX_DEPTH = 64
"""Most lists and mappings around a value."""
MAX_PLACE_CHARACTERS = 200
"""Most characters of a value's place in a message."""
VALUE_CHARACTERS = 8
"""Counted for every value that is no text, so that numbers and empty lists are bounded too."""


class NotPlain(Exception):
    """A value is not allowed; the message names its place and says what is allowed."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem, self.place = problem, ""

    def __str__(self) -> str:
        return f"{self.place} {self.problem}"


class Copier:
    """Copies values that together have at most `most` characters, counted over all their texts and names.

    Values of the types `also` are kept as they are; with `any_text`, texts may hold half a surrogate pair.

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
        """A copy of the value.

        Raises:
            NotPlain: the value is of another type, no valid text, nested too deeply or too large.
        """
        kind = type(value)  # `isinstance` would ask the value itself
        if issubclass(kind, str):
            return self._text(value)
        self._count(VALUE_CHARACTERS)
        if value is None or kind is bool or issubclass(kind, self._also):
            return value
        if kind is dict or issubclass(kind, Mapping):
            return self._container(self._mapping, value)
        if kind is list or (issubclass(kind, Sequence) and not issubclass(kind, bytes | bytearray | memoryview)):
            return self._container(self._list, value)
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

    def _container(self, copy: Callable[[Any], Any], value: Any) -> Any:
        if self._depth == MAX_DEPTH:
            raise NotPlain(f"is nested too deeply; allowed are {MAX_DEPTH} levels")
        self._depth += 1
        copied = copy(value)
        self._depth -= 1
        return copied

    def _mapping(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        copied = {}
        for key, item in value.items():
            name = self._name(key)
            copied[name] = self._at(name, item)
        return copied

    def _list(self, value: Sequence[Any]) -> list[Any]:
        return [self._at(i, item) for i, item in enumerate(value)]

    def _at(self, place: int | str, value: object) -> Any:
        try:
            return self.copy(value)
        except NotPlain as refused:
            refused.place = f"[{place!r:.80}]{refused.place[:MAX_PLACE_CHARACTERS]}"
            raise

    def _name(self, key: object) -> str:
        """A name as text; JSON makes texts of names that are numbers, too."""
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
