"""Trajectories that go on in another generator, from the steps that the first one left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from service.handoff.steps.builder import steps_table
from service.handoff.steps.tables import step_objects
from service.rollout import handover
from service.rollout.agent_loop import Played, run_trajectory
from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import Mode
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import Environment, StepResult
from service.rollout.isolation import IsolatedEnvironment, environment_processes
from service.rollout.step_sinks import StepColumns
from service.types import Step, TrajectoryId
from tests.pure.rollout import counting
from tests.pure.rollout.conftest import QUESTION, ScriptedEngine, limits
from tests.pure.rollout.counting import TURNS, Counts, Forgetful, Long, Replayable, Restorable

OF = TrajectoryId(3, 1)


async def played(
    chat: Chat, make: Callable[[], Environment], left: Sequence[Step] | None = None, mode: Mode = "append"
) -> tuple[list[Step], Played, int]:
    """The new steps, the result, and how many turns were sampled."""
    engine, columns = ScriptedEngine(chat, lambda words: f"look fox {len(words) % 9 + 1}"), StepColumns()
    allowed = limits(chat, max_snapshot_bytes=4096, max_turns=TURNS + 1, conversation=mode, max_input_length=400)
    table = None if left is None else steps_table(left)
    guard = EnvGuard("counts", make, allowed)
    result = await run_trajectory(OF, QUESTION, guard, engine, chat, allowed, 0, columns, earlier=table)
    return step_objects(columns.steps()), result, len(engine.prompts)


def same(one: Step, other: Step) -> bool:
    pairs = ((getattr(one, name), getattr(other, name)) for name in Step.__dataclass_fields__)
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in pairs)


@pytest.mark.parametrize("mode", ["append", "rerender", "inline"])
@pytest.mark.parametrize("make", [Restorable, Replayable])
async def test_what_goes_on_elsewhere_samples_only_the_turns_that_are_missing(
    chat: Chat, make: Callable[[], Any], mode: Mode
) -> None:
    whole, result, sampled = await played(chat, make, mode=mode)
    assert (len(whole), sampled, result.end.reward, dict(result.info)) == (TURNS, TURNS, TURNS, {"turns": TURNS})
    for n_left in range(1, TURNS + 1):
        steps, again, sampled = await played(chat, make, whole[:n_left], mode)
        assert sampled == TURNS - n_left
        assert all(same(one, other) for one, other in zip(steps, whole[n_left:], strict=True))
        assert (again.end, dict(again.info)) == (result.end, dict(result.info))


async def test_a_restored_conversation_has_all_that_its_messages_held(chat: Chat) -> None:
    told = [{"role": "tool", "content": "7", "name": "add", "calls": [{"id": 1, "arguments": {"a": None}}]}]
    guard = EnvGuard("counts", Restorable, limits(chat))
    await guard.reset(QUESTION, 0)
    text = await handover.write_note(guard, StepResult(told, 0.0, False), None, Counter(), 4096)  # type: ignore[arg-type]
    await guard.close(OF)
    assert msgspec.json.decode(text, type=handover.Note).messages == told


async def test_a_history_that_an_environment_emptied_is_empty_in_the_other_generator_too(chat: Chat) -> None:
    guard = EnvGuard("counts", Restorable, limits(chat))
    await guard.reset(QUESTION, 0)
    result = StepResult(QUESTION.prompt, 0.0, False, history=[])
    text = await handover.write_note(guard, result, result.history, Counter(), 4096)
    await guard.close(OF)
    assert msgspec.json.decode(text, type=handover.Note).messages == []


async def test_a_restored_environment_is_not_played_again_and_a_replayed_one_hears_the_same_texts(chat: Chat) -> None:
    for kind, heard in ((Restorable, 1), (Replayable, TURNS)):
        made: list[Counts] = [kind(), kind()]
        first, second = made
        whole, _, _ = await played(chat, partial(made.pop, 0))
        await played(chat, made.pop, whole[: TURNS - 1])
        assert second.heard == first.heard[TURNS - heard :]


async def test_an_environment_that_answers_otherwise_when_it_is_played_again_fails_the_attempt(chat: Chat) -> None:
    Forgetful.instances = 0
    whole, _, _ = await played(chat, Forgetful)
    steps, result, sampled = await played(chat, Forgetful, whole[:2])
    assert (steps, sampled, result.end.stop_reason) == ([], 0, "environment_not_restored")
    assert "step 0 had another reward" in result.failure


@pytest.mark.parametrize("make", [Counts, Long])
async def test_steps_of_an_environment_without_a_snapshot_or_with_a_long_one_say_nothing_but_the_end(
    chat: Chat, make: Callable[[], Any]
) -> None:
    whole, result, _ = await played(chat, make)
    assert [step.portable for step in whole] == [False] * (TURNS - 1) + [True]
    steps, again, sampled = await played(chat, make, whole)
    assert (steps, sampled, again.end) == ([], 0, result.end)


async def test_an_environment_in_a_process_of_its_own_goes_on_too(chat: Chat) -> None:
    processes = environment_processes(1 << 10)
    for kind in (Restorable, Replayable):
        name = f"{counting.__name__}:{kind.__name__}"
        make = partial(IsolatedEnvironment, processes, name, {}, [counting.__name__])
        whole, result, _ = await played(chat, make)
        _, again, sampled = await played(chat, make, whole[:3])
        assert (again.end, sampled) == (result.end, 1)
    await processes.close()
