"""The agent loop: steps, extensions, limits, ends and failures."""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from baton.examples import lookup
from service.columns import digest, widened
from service.config.rollout import EnvConfig, GeneratorConfig
from service.handoff.steps.values import MAX_REWARD
from service.rollout.chat.chat import Chat
from service.rollout.engine import AgentLimits, Generation, Mode, PlaySettings, Sampling
from service.rollout.environment import Message, StepResult
from service.rollout.plain_values import BYTES
from service.types import NO_VERSION, ROUTE_NATIVELY
from tests.pure.rollout.conftest import (
    QUESTION,
    VERSION,
    ScriptedEngine,
    ScriptedEnvironment,
    generated,
    play,
    told,
    whole_prompts,
)


def optimal(words: list[str]) -> str:
    """What a policy says that reads the conversation and acts on it; it knows no fact that it was not told."""
    question, *turns = " ".join(words).split(" assistant")
    asked = question.split()
    attribute, entity, two_hops = asked[4], asked[-2], lookup.RELATION in asked
    told_words = [turn.split()[-1] for turn in turns[:-1]]
    needed = 2 if two_hops else 1
    if len(told_words) == needed:
        return f"answer {told_words[-1]}"
    if two_hops and not told_words:
        return f"look {entity} {lookup.RELATION}"
    return f"look {told_words[-1] if two_hops else entity} {attribute}"


async def test_an_appended_end_stays_in_the_ids_and_carries_no_loss(chat: Chat) -> None:
    engine = ScriptedEngine(chat, lambda words: generated(chat.plain("look fox age").tolist(), sampled_end=False))
    steps, _ = await play(chat, engine, ScriptedEnvironment([told("17"), told("owl", 1.0, True)]))
    for step in steps:
        assert step.response_ids.tolist() == [*chat.plain("look fox age").tolist(), chat.end_id]
        assert step.loss_mask.tolist() == [True, True, True, False]
        assert step.logprobs is not None
        assert step.logprobs.tolist() == [-0.5, -0.5, -0.5, 0.0]
        assert step.versions.tolist() == [VERSION, VERSION, VERSION, NO_VERSION]
    assert whole_prompts(steps) == engine.prompts
    assert engine.prompts[1].count(chat.end_id) == 3  # of the question, of the response, of the observation


@pytest.mark.parametrize(
    ("cut", "n_turns", "done", "reason"),
    [
        ({0, 1}, 2, True, "truncated"),
        ({1}, 2, False, "truncated"),
        ({0}, 2, True, "stop"),
        ({0}, 2, False, "max_turns"),
        ({1}, 9, False, "length"),
    ],
)
async def test_a_trajectory_whose_last_response_was_cut_says_so(
    chat: Chat, cut: set[int], n_turns: int, done: bool, reason: str
) -> None:
    said = chat.plain("look fox age").tolist()

    def script(words: list[str]) -> Generation:
        is_cut = len(engine.prompts) - 1 in cut
        return generated(said, "length", sampled_end=False) if is_cut else generated([*said, chat.end_id])

    engine = ScriptedEngine(chat, script)
    environment = ScriptedEnvironment([told("17"), told("17", done=done)])
    fits = 64 if reason != "length" else len(chat.prompt(QUESTION.prompt)) + 12
    steps, end = await play(chat, engine, environment, max_turns=n_turns, max_input_length=fits)
    assert (len(steps), end.stop_reason) == (2, reason)
    assert [step.stop_reason for step in steps] == ["length" if turn in cut else "stop" for turn in range(2)]


async def test_the_environment_hears_the_text_up_to_its_stop_string_and_the_ids_stay_whole(chat: Chat) -> None:
    engine = ScriptedEngine(chat, lambda words: generated(chat.plain("look fox age owl").tolist(), sampled_end=False))
    environment = ScriptedEnvironment([told("x", 0.0, True)])
    (step,), _ = await play(chat, engine, environment, sampling=Sampling(max_tokens=7, stop=("age",)))
    assert environment.heard == ["look fox age"]
    assert chat.text(step.response_ids) == "look fox age owl"


class Panicked(BaseException):
    """As what comes out of a library that is written in Rust."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise AttributeError("no message")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (ValueError("broken"), "environment_error"),
        (SystemExit(3), "environment_error"),
        (KeyboardInterrupt(), "environment_error"),
        (GeneratorExit(), "environment_error"),
        (Panicked("anything may be raised by what the policy wrote"), "environment_error"),
        (Unspeakable(), "environment_error"),
        (TimeoutError("of its own"), "environment_error"),
        (told("17", float("nan")), "environment_reward"),
        (told("17", 2 * MAX_REWARD, True), "environment_reward"),
        (StepResult([], "much", False), "environment_reward"),  # type: ignore[arg-type]
        (told("x" * 10_000_000), "environment_output"),
        (told("17", 1.0, True)._replace(info=None), "stop"),
        (told("17", 1.0, True)._replace(info={"tokens": 10**400, "right": np.bool_(True)}), "stop"),
        (StepResult([{"role": "user"}], 0.0, False), "environment_output"),  # type: ignore[list-item,typeddict-item]
        *(
            (told("17")._replace(messages=[{"role": role, "content": "17", "tool_calls": calls}]), "environment_output")
            for role, calls in (("human", []), ("assistant", [{"x": math.nan}]))
        ),
        (StepResult(None, 0.0, False), "environment_output"),  # type: ignore[arg-type]
        ("17", "environment_error"),
        (told("17")._replace(reward=10**400), "environment_reward"),
        (told("17")._replace(reward=10**5000), "environment_reward"),
        (told("17")._replace(info=5), "environment_error"),
        (told("17")._replace(info={"why": "it"}), "environment_error"),
        (told("17")._replace(done=np.ones(2)), "environment_error"),
        (told("17")._replace(messages=[{"role": ["user"], "content": "17"}]), "environment_output"),
        *(
            (told("17")._replace(messages=[{"role": "tool", "content": of(b"17")}]), "environment_output")
            for of in BYTES
        ),  # type: ignore[list-item]
    ],
)
async def test_an_environment_that_fails_costs_its_own_trajectory_with_the_reason(
    chat: Chat, result: StepResult | BaseException, reason: str
) -> None:
    environment = ScriptedEnvironment([told("17", 0.5), result])
    steps, end = await play(chat, "look fox age", environment)
    n_steps = 2 if reason == "stop" else 1
    assert (len(steps), end.n_steps, end.stop_reason, environment.closed) == (n_steps, n_steps, reason, 1)


DOUBLED = [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1, "x": 2}'}}]


@pytest.mark.parametrize(("role", "calls"), [("robot", []), ("assistant", DOUBLED)])
async def test_a_message_that_no_template_shows_as_it_was_meant_ends_the_trajectory(
    chat: Chat, role: str, calls: list[Any]
) -> None:
    result: Any = told("17")._replace(messages=[{"role": role, "content": "17", "tool_calls": calls}])
    _, end = await play(chat, "look fox age", ScriptedEnvironment([result, told("17", 1.0, True)]))
    assert end.stop_reason == "environment_output"


async def test_an_engine_that_breaks_is_not_mistaken_for_a_bad_environment(chat: Chat) -> None:
    def script(words: list[str]) -> str:
        raise TimeoutError("the engine's own")

    environment = ScriptedEnvironment([])
    with pytest.raises(TimeoutError, match="the engine's own"):
        await play(chat, ScriptedEngine(chat, script), environment)
    assert environment.closed == 1


def test_the_engine_is_asked_for_one_token_less_than_a_response_may_have(chat: Chat) -> None:
    settings = PlaySettings(0, EnvConfig(), GeneratorConfig(max_generate_length=8), {})
    sampling = AgentLimits.of(settings, chat.end_ids).sampling
    assert (sampling.max_tokens, sampling.stop_token_ids) == (7, (chat.end_id,))


@pytest.mark.parametrize("mode", ["append", "rerender", "inline"])
@pytest.mark.parametrize(
    ("result", "n_steps"),
    [
        (told("half \ud800 pair"), 0),
        (told("17")._replace(history=[]), 1),
        (told("17")._replace(history=[{"role": "\udfff", "content": "17"}]), 0),
    ],
)
async def test_messages_that_are_no_prompt_end_their_own_trajectory_also_after_its_finished_step(
    chat: Chat, result: StepResult, n_steps: int, mode: Mode
) -> None:
    steps, end = await play(chat, "look fox age", ScriptedEnvironment([result]), conversation=mode)
    assert (len(steps), end.n_steps, end.stop_reason) == (n_steps, n_steps, "environment_output")


async def test_every_prompt_is_exactly_the_previous_prompt_and_response_and_then_what_is_new(chat: Chat) -> None:
    def script(words: list[str]) -> Generation:
        said = generated([*chat.plain("look fox age").tolist(), chat.end_id])
        # The engine records every token but the last; each token's expert is its position here.
        recorded = np.arange(len(engine.prompts[-1]) + 3, dtype=np.int16).reshape(-1, 1, 1)
        return replace(said, routed_experts=recorded)

    engine, start = ScriptedEngine(chat, script), 0
    steps, _ = await play(chat, engine, ScriptedEnvironment([told("17"), told("none"), told("owl", 1.0, True)]))
    assert whole_prompts(steps) == engine.prompts
    said = [Message(role="assistant", content="look fox age"), Message(role="user", content="17")]
    assert engine.prompts[1] == chat.prompt([*QUESTION.prompt, *said]).tolist()
    for before, after in itertools.pairwise(steps):
        whole = [*engine.prompts[before.index], *before.response_ids.tolist()]
        assert engine.prompts[after.index][: len(whole)] == whole
        assert after.extends == (before.index, len(whole), digest(np.asarray(whole, dtype=np.int32)))
    for step in steps:
        stop = start + len(step.prompt_ids) + len(step.response_ids)
        assert step.routed_experts is not None
        assert step.routed_experts.ravel().tolist() == [*range(start, stop - 1), ROUTE_NATIVELY]
        start = stop


@pytest.mark.parametrize(
    ("limit", "n_steps", "reward"),
    [(11, 0, 0.0), (12, 1, 0.25), (18, 1, 0.25), (21, 1, 0.25), (22, 2, 1.0)],  # 12 tokens; 4 + 6 more in each turn
)
async def test_a_turn_whose_prompt_is_longer_than_the_limit_ends_the_trajectory_without_a_step(
    chat: Chat, limit: int, n_steps: int, reward: float
) -> None:
    engine = ScriptedEngine(chat, lambda words: "look fox age")
    environment = ScriptedEnvironment([told("17", 0.25), told("x", 1.0, True)])
    steps, end = await play(chat, engine, environment, max_input_length=limit)
    assert (len(steps), end.n_steps, end.stop_reason) == (n_steps, n_steps, "stop" if n_steps == 2 else "length")
    assert end.reward == reward and max(map(len, engine.prompts), default=0) <= limit and environment.closed == 1


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
async def test_a_model_that_produced_no_token_leaves_an_appended_end_alone(chat: Chat, dtype: type[np.generic]) -> None:
    experts = np.ones((len(chat.prompt(QUESTION.prompt)), 2, 1), dtype)
    engine = ScriptedEngine(chat, lambda words: replace(generated([], sampled_end=False), routed_experts=experts))
    (step,), _ = await play(chat, engine, ScriptedEnvironment([told("x", 0.0, True)]))
    assert (step.response_ids.tolist(), step.loss_mask.tolist()) == ([chat.end_id], [False])
    assert step.routed_experts is not None and step.routed_experts.dtype == dtype
    assert step.routed_experts[:-1].tolist() == experts.tolist()
    assert widened(step.routed_experts)[-1].tolist() == [[ROUTE_NATIVELY], [ROUTE_NATIVELY]]


class Late(ScriptedEnvironment):
    """Does not answer, waits for what somebody else cancels, or does not close."""

    def __init__(self, how: str) -> None:
        super().__init__([told("17"), told("x", 1.0, True)])
        self.how = how

    async def step(self, text: str) -> StepResult:
        other = asyncio.ensure_future(asyncio.Event().wait() if self.how == "silent" else asyncio.sleep(0))
        if self.how == "cancelled":
            other.cancel()
        await other
        return await super().step(text)

    async def close(self) -> None:
        await super().close()
        if self.how == "open":
            raise OSError("still open")


@pytest.mark.parametrize(
    ("how", "reason"), [("silent", "environment_timeout"), ("cancelled", "environment_error"), ("open", "stop")]
)
async def test_an_environment_that_is_late_costs_its_trajectory_and_one_that_does_not_close_nothing(
    chat: Chat, how: str, reason: str
) -> None:
    environment = Late(how)
    steps, end = await play(chat, "look fox age", environment, step_deadline=0.05 if how == "silent" else 60.0)
    assert (len(steps), end.stop_reason, environment.closed) == (2 if how == "open" else 0, reason, 1)


class SilentEngine(ScriptedEngine):
    async def generate(self, *args: object) -> Generation:
        await asyncio.Event().wait()
        return generated([])


async def test_a_turn_that_the_engine_aborts_or_never_finishes_gives_no_step(chat: Chat) -> None:
    engine = ScriptedEngine(chat, lambda words: generated([5, 6], stop_reason="abort", sampled_end=False))
    steps, end = await play(chat, engine, ScriptedEnvironment([]))
    assert (steps, end.stop_reason) == ([], "abort")
    steps, end = await play(chat, SilentEngine(chat, lambda words: ""), ScriptedEnvironment([]), request_deadline=0.05)
    assert (steps, end.stop_reason) == ([], "engine_timeout")
