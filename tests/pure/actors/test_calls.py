"""Errors of actors in one line, and starts of actors that die."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from actors import calls
from actors.calls import in_a_line, started
from service.backoff import Backoff

DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: TrainerRank
\tpid: 17
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process \
is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called."""


def test_a_process_that_died_is_one_line_without_guesses_at_the_cause() -> None:
    said = in_a_line(RayActorError(error_msg=DIED))
    assert said == "its process died: Worker unexpectedly exits with a connection error code 2; see its log"


REFUSED, DEAD = ActorUnavailableError("it restarts", None), ActorDiedError()
BROKEN = ActorDiedError.from_task_error(
    RayTaskError("__init__", "Traceback ...\nImportError: no such package", ImportError())
)


def answering(*answers: object) -> Callable[[], Awaitable[object]]:
    """A call that raises or returns these answers, one after the other."""
    left = iter(answers)

    async def start() -> object:
        if isinstance(answer := next(left), Exception):
            raise answer
        return answer

    return start


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RESTARTING", Backoff(0.0))


@pytest.mark.parametrize(
    ("answers", "error"),
    [([DEAD, REFUSED, REFUSED, REFUSED, "up"], None), ([REFUSED, DEAD, REFUSED, DEAD, "up"], ActorDiedError)],
)
def test_a_call_that_is_refused_while_the_process_restarts_is_no_try(
    answers: Sequence[object], error: type[Exception] | None
) -> None:
    if error is None:
        assert asyncio.run(started(answering(*answers), tries=2)) == "up"
    else:
        with pytest.raises(error):
            asyncio.run(started(answering(*answers), tries=2))


def test_an_actor_that_cannot_be_made_is_not_waited_for() -> None:
    """Ray starts an actor again that died, but none whose constructor failed."""
    with pytest.raises(ActorDiedError) as caught:
        asyncio.run(started(answering(DEAD, BROKEN, "up")))
    assert in_a_line(caught.value) == "ImportError: no such package"
