"""Calling actors: errors come out as what they are."""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import ray.exceptions

from service.errors import BatonError, Starved

MOST_CHARACTERS = 200
CALL_SECONDS = 300.0
"""Seconds that an ordinary answer may take; a buffer that starts again reads its journal first."""


def resolve_actor(actor: Any) -> Any:
    """The actor behind a name; a handle is itself.

    An actor that may be restarted is given names: Ray warns that a handle among its arguments may be gone by then.
    """
    return ray.get_actor(actor) if isinstance(actor, str) else actor


async def call(method: Any, *arguments: Any, who: str, within: float | None = CALL_SECONDS) -> Any:
    """Call an actor's method and wait for the answer; an error that Baton raised there is raised here as itself.

    Raises:
        Starved: `who` did not answer within so many seconds, as a frozen process does not.
    """
    waiting = asyncio.timeout(within)
    try:
        async with waiting:
            return await method.remote(*arguments)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise
    except TimeoutError:
        if not waiting.expired():
            raise
        raise Starved(f"no answer of {who} for {within:.0f} s") from None


def in_a_line(error: BaseException) -> str:
    """What went wrong, without the way there."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[0][:MOST_CHARACTERS]
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:MOST_CHARACTERS] if lines else type(error).__name__
