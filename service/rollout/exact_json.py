"""Reads JSON without changing it. Python's reader drops the first value of a repeated key, reads a number that is too
large as infinity, and reads NaN, which JSON does not have. Here each of them is an error that names its field:

    {"x": [{"y": 1e400}]}   x[0].y
    {"x": 1, "x": 2}        x
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite, nan
from typing import Any

import msgspec


class InexactJson(ValueError):
    """Raised if a value cannot be read as it was written; `field`: its path."""

    reason = "is NaN, a number that is too large, or a key that comes twice"

    def __init__(self, field: str) -> None:
        self.field = field.removeprefix(".")[:200]
        super().__init__(f"{self.field} {self.reason}".lstrip())


def exact_json(text: str | bytes, keeps_null: bool = True, field: str = "", keeps_half: bool = True) -> Any:
    """Parse JSON; without `keeps_null`, fields that are null are left out. `field`: the text's path in errors.

    Raises:
        InexactJson: a value would be changed.
        ValueError: the text is no JSON; or it has half of a surrogate pair, without `keeps_half`.
        RecursionError: it is nested too deeply.
    """
    written = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    with suppress(ValueError, OverflowError, RecursionError):  # the slower way below names the field
        value = msgspec.json.decode(written)
        if msgspec.json.encode(value).count(b'"') == written.count(b'"') + written.count(rb"\u0022"):
            # No quote is lost, so no key comes twice.
            return value if keeps_null or b"null" not in written else without_nulls(value)

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = Counter(name for name, _ in pairs) if len(dict(pairs)) < len(pairs) else {}
        return dict(pairs) | {name: nan for name, times in twice.items() if times > 1}

    value = json.loads(written.decode(errors="surrogatepass"), object_pairs_hook=object_of)
    if (wrong := _not_finite(value)) is not None:
        raise InexactJson(field + wrong)
    if not keeps_half:
        json.dumps(value, ensure_ascii=False).encode()
    return value if keeps_null else without_nulls(value)


def read_arguments(arguments: Any) -> Any:
    """The values in a call's arguments; arguments that are no text in JSON are unchanged. Raises `InexactJson`."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return exact_json(arguments, field="arguments")
    except InexactJson:
        raise
    except (ValueError, RecursionError):
        return arguments


def check_calls(message: Mapping[str, Any]) -> None:
    """Raises `InexactJson` if a call in a message has arguments in JSON that cannot be read as they were written."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        with suppress(TypeError, KeyError):  # it is no call
            read_arguments(call["function"]["arguments"])


def _not_finite(value: Any) -> str | None:
    """The path of a number that is not finite; None if there is none."""
    if isinstance(value, float) and not isfinite(value):
        return ""
    for name, of in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        if (inner := _not_finite(of)) is not None:
            return (f".{name}" if isinstance(value, dict) else f"[{name}]") + inner
    return None


def without_nulls(value: Any, texts: dict[str, str] | None = None) -> Any:
    """A value without fields that are null. Equal texts in it share one object with `texts`, which holds them."""
    if isinstance(value, dict):
        return {name: without_nulls(of, texts) for name, of in value.items() if of is not None}
    if isinstance(value, list):
        return [without_nulls(of, texts) for of in value]
    return texts.setdefault(value, value) if texts is not None and isinstance(value, str) else value
