"""The guard around an environment: no answer is waited for longer than its deadline, whatever its task does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from service.errors import RunFailed
from service.rollout import env_guard
from service.rollout.chat.chat import Chat
from service.rollout.env_guard import EnvGuard, LeakedTasks
from service.rollout.environment import Message, StepResult, Task
from service.types import TrajectoryId
from tests.pure.rollout.conftest import QUESTION, limits, play


class Stubborn:
    """One of its methods swallows its first cancellation, as a bare `except:` does, and waits until it is let go."""

    def __init__(self, where: str, catch: type[BaseException] = BaseException) -> None:
        self.where, self.catch = where, catch
        self.entered, self.let_go = asyncio.Event(), asyncio.Event()
        self.did: list[str] = []

    async def _do(self, method: str) -> None:
        if method == self.where:
            self.entered.set()
            with suppress(self.catch):
                await self.let_go.wait()
            await self.let_go.wait()
        self.did.append(method)

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        await self._do("reset")
        return task.prompt

    async def step(self, text: str) -> StepResult:
        await self._do("step")
        return StepResult((), 1.0, True)

    async def close(self) -> None:
        await self._do("close")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_guard, "RETURN_SECONDS", 0.05)


async def until_empty(leaked: LeakedTasks) -> None:
    async with asyncio.timeout(60):
        while len(leaked):
            await asyncio.sleep(0)


@pytest.mark.parametrize("catch", [BaseException, asyncio.CancelledError])
@pytest.mark.parametrize(
    ("where", "reason"), [("reset", "environment_timeout"), ("step", "environment_timeout"), ("close", "stop")]
)
async def test_a_swallowed_cancellation_frees_the_trajectory_and_is_counted_until_the_environment_returns(
    chat: Chat, where: str, reason: str, catch: type[BaseException]
) -> None:
    environment, leaked = Stubborn(where, catch), LeakedTasks()
    async with asyncio.timeout(60):
        _, end = await play(chat, "look fox age", environment, leaked=leaked, step_deadline=0.05)
    assert (end.stop_reason, len(leaked)) == (reason, 1)
    environment.let_go.set()
    await until_empty(leaked)
    assert environment.did[-1] == "close"


async def test_a_cancelled_trajectory_ends_also_when_its_environment_swallows_that(chat: Chat) -> None:
    environment, leaked = Stubborn("step"), LeakedTasks()
    playing = asyncio.ensure_future(play(chat, "look fox age", environment, leaked=leaked))
    await environment.entered.wait()
    playing.cancel()
    done, _ = await asyncio.wait({playing}, timeout=60)
    assert done == {playing} and playing.cancelled()
    assert len(leaked) == 1


async def test_the_methods_of_an_episode_run_in_one_task_as_scopes_across_them_need(chat: Chat) -> None:
    tasks: set[asyncio.Task[object] | None] = set()

    class Notes(Stubborn):
        async def _do(self, method: str) -> None:
            tasks.add(asyncio.current_task())
            self.did.append(method)

    environment = Notes("")
    await play(chat, "look fox age", environment)
    assert (environment.did, len(tasks)) == (["reset", "step", "close"], 1)


async def test_an_environment_that_cancels_its_own_task_loses_its_own_trajectory_only(chat: Chat) -> None:
    class CancelsItself(Stubborn):
        async def reset(self, task: Task, seed: int) -> Sequence[Message]:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            return task.prompt

    environment, leaked = CancelsItself(""), LeakedTasks()
    async with asyncio.timeout(60):
        _, end = await play(chat, "look fox age", environment, QUESTION, leaked=leaked)
    assert (end.stop_reason, environment.did, len(leaked)) == ("environment_error", ["close"], 0)


async def test_beyond_the_bound_the_process_has_to_be_renewed_and_the_environments_are_named(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_guard, "MAX_LEAKED_TASKS", 1)
    environments, leaked = [Stubborn("step"), Stubborn("step")], LeakedTasks()
    for environment in environments:
        leaked.check()
        await play(chat, "look fox age", environment, leaked=leaked, step_deadline=0.05)
    with pytest.raises(RunFailed, match=r"2 episodes did not return .*\(2 of scripted\).*CancelledError"):
        leaked.check()
    for environment in environments:
        environment.let_go.set()
    await until_empty(leaked)
    leaked.check()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
async def test_a_task_of_an_environment_that_exits_ends_its_own_trajectory_and_not_the_event_loop(
    chat: Chat, error: BaseException
) -> None:
    async def exits() -> None:
        raise error

    class StartsTasks(Stubborn):
        async def step(self, text: str) -> StepResult:
            asyncio.ensure_future(exits()).cancel()  # before its first line
            await asyncio.gather(asyncio.sleep(0), exits())
            return StepResult((), 1.0, True)

    _, end = await play(chat, "look fox age", StartsTasks(""))
    assert end.stop_reason == "environment_error"


async def test_only_a_tool_that_the_task_describes_names_a_call_whatever_the_policy_wrote(chat: Chat) -> None:
    environment, named = Stubborn("nowhere"), list[str]()
    guard = EnvGuard("tools", lambda: environment, limits(chat), answered=lambda name, began: named.append(name))
    described = ({"type": "function", "function": {"name": "search"}}, {"name": "open"}, {"name": 7})
    await guard.reset(replace(QUESTION, tools=described), 0)
    for name in ("search", "open", "password-1234", "7"):
        await guard.step(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
    await guard.close(TrajectoryId(0, 0))
    assert named == ["reset", "search", "open", "step", "step"]
