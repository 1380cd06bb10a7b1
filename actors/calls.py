"""Calling actors: errors come out as what they are."""

from __future__ import annotations

from typing import Any

import ray
import ray.exceptions

from service.errors import BatonError

MOST_CHARACTERS = 200


def found(actor: Any) -> Any:
    """The actor behind a name; a handle is itself.

    An actor that may be restarted is given names: Ray warns that a handle among its arguments may be gone by then.
    """
    return ray.get_actor(actor) if isinstance(actor, str) else actor


async def call(method: Any, *arguments: Any) -> Any:
    """Call an actor's method and wait for the answer; an error that Baton raised there is raised here as itself."""
    try:
        return await method.remote(*arguments)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise


def in_a_line(error: BaseException) -> str:
    """What went wrong, without the way there."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[0][:MOST_CHARACTERS]
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:MOST_CHARACTERS] if lines else type(error).__name__
