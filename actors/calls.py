"""Calls methods of actors, with a deadline. Baton's own errors keep their type: Ray's wrapping is removed."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable
from functools import partial
from textwrap import shorten
from typing import Any, TypeVar

import ray
import ray.exceptions

from service.backoff import Backoff, retried
from service.errors import BatonError, ProcessLost, RunFailed, Starved
from service.handoff.verbs import Wait
from service.types import Refusal

log = logging.getLogger(__name__)

ACTOR_FAILED = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, BatonError)
"""Errors of a call to an actor whose process, engine or node failed; any other error is a bug."""

MAX_CHARACTERS = 200

_DIED = re.compile(r"Worker exit detail: ([^.]+)")
"""Matches the reason in Ray's message about a dead process; possible causes that Ray lists after it are left out."""

CALL_SECONDS = 300.0
"""Deadline of a call in seconds; a buffer that restarts reads its journal before it answers."""
RESTARTING = Backoff(0.5, 0.5)
"""Pauses, in seconds, between calls to an actor that Ray restarts."""

Answer = TypeVar("Answer")


def resolve_actor(actor: Any) -> Any:
    """Return the handle of an actor, from its name or its handle.

    An actor that Ray may restart gets names as arguments, because a handle may be invalid after the restart.
    """
    return ray.get_actor(actor) if isinstance(actor, str) else actor


async def call(method: Any, *arguments: Any, who: str, within: float | None = CALL_SECONDS) -> Any:
    """Call an actor's method and wait for the answer, see `answer`."""
    return await answer(method.remote(*arguments), who=who, within=within)


async def answer(called: Awaitable[Any], *, who: str, within: float | None) -> Any:
    """Wait for the answer to a call; a `BatonError` that the method raised is raised here without Ray's wrapping.

    Raises:
        Starved: `who` did not answer within `within` seconds.
    """
    waiting = asyncio.timeout(within)
    try:
        async with waiting:
            return await called
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, BatonError):
            raise error.cause from None
        raise
    except TimeoutError:
        if not waiting.expired():
            raise
        raise Starved(f"no answer of {who} for {within:.0f} s") from None


async def started(
    start: Callable[[], Awaitable[Answer]], within: float = CALL_SECONDS, tries: float = math.inf
) -> Answer:
    """Call the method that starts an actor. If the actor's process is lost meanwhile, call the method again in the
    restarted process. A call that Ray refuses while the process restarts is no try.

    Raises:
        RayActorError: a process was lost in the last of `tries` calls, or more than `within` seconds after the first
            call; or it cannot come back, see `check_comes_back`.
    """
    taken = partial(retried, start, ray.exceptions.ActorUnavailableError, RESTARTING, within=within)
    lost = ray.exceptions.RayActorError
    return await retried(taken, lost, RESTARTING, within=within, tries=tries, failed=check_comes_back)


def check_comes_back(error: BaseException) -> None:
    """Raise the error of a call again if the actor's constructor raised it, or if its process could not import the
    actor's code: Ray does not start such an actor again."""
    if isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed:
        raise error


def accepted(answer: object) -> None:
    """Check the buffer's answer to a call of the trainer.

    Raises:
        RunFailed: the buffer refused the call, which happens after another trainer has joined.
    """
    if isinstance(answer, Refusal):
        raise RunFailed(f"the buffer refused this trainer: {answer}")
    if not isinstance(answer, Wait | None):
        raise TypeError(f"unexpected answer of the buffer: {answer!r}")


def may_be_dropped(waiting: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an error of this future if no code awaits it any more."""
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())


def log_failure(task: asyncio.Future[Any], text: str) -> None:
    """Log `text` and the error if the task fails. For tasks that no code awaits: without the log the error would appear
    nowhere."""

    def ended(done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error(text, exc_info=error)

    task.add_done_callback(ended)


def in_a_line(error: BaseException) -> str:
    """The error's text in one line, without the traceback; a long text is cut between two words."""
    if isinstance(error, ray.exceptions.RayTaskError):
        text = f"{type(error.cause).__name__}: {error.cause}".strip().splitlines()[0]
    elif isinstance(error, ray.exceptions.RayActorError) and (died := _DIED.search(str(error))):
        text = f"its process died: {died[1]}; see its log"
    elif isinstance(error, ProcessLost):
        return str(error)
    else:
        text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return shorten(text, MAX_CHARACTERS, placeholder=" ...")


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in nested exception groups; the other errors are consequences of the first one."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
