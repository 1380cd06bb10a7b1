"""The three ways in which one turn follows another, and what an environment may change about it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from service.rollout.agent_loop import TrajectoryResult
from service.rollout.chat.chat import Chat
from service.rollout.environment import Message, StepResult
from tests.pure.rollout.conftest import (
    QUESTION,
    ScriptedEngine,
    ScriptedEnvironment,
    generated,
    play,
    templated,
    told,
    whole_prompts,
)


async def test_inline_observations_stand_bare_between_responses_and_only_the_last_response_is_closed(
    chat: Chat,
) -> None:
    said = iter(["look fox age", "look owl age", "answer 17"])
    engine = ScriptedEngine(chat, lambda words: generated(chat.plain(next(said)).tolist(), sampled_end=False))
    environment = ScriptedEnvironment([told("17"), told("24"), told("x", 1.0, True)])
    steps, _ = await play(chat, engine, environment, conversation="inline")
    assert chat.text(steps[1].prompt_ids) == "17"
    assert [step.loss_mask.tolist() for step in steps] == [[True] * 3, [True] * 3, [True, True, False]]
    assert steps[-1].response_ids[-1] == chat.end_id
    assert whole_prompts(steps) == engine.prompts
    opening = chat.prompt(QUESTION.prompt).tolist()
    assert engine.prompts[2] == [*opening, *chat.plain("look fox age 17 look owl age 24").tolist()]


@pytest.mark.parametrize("mode", ["append", "rerender", "inline"])
async def test_an_environment_may_replace_the_history_by_a_shorter_one(chat: Chat, mode: str) -> None:
    shorter = [Message(role="user", content="owl age 17 what is the age of fox ?")]
    engine = ScriptedEngine(chat, lambda words: "look fox age")
    environment = ScriptedEnvironment([StepResult([], 0.0, False, history=shorter), told("24"), told("x", 1.0, True)])
    steps, _ = await play(chat, engine, environment, conversation=mode)
    assert engine.prompts[1] == chat.prompt(shorter).tolist()
    first, second = (step.extends for step in steps[1:])
    assert first is not None and (first.step, first.length) == (0, 2), "only the opening of the user's turn is the same"
    assert second is not None and second.step == 1
    assert whole_prompts(steps) == engine.prompts


async def test_a_prompt_may_have_a_temperature_of_its_own(chat: Chat) -> None:
    engine = ScriptedEngine(chat, lambda words: "answer 17")
    for temperature, wanted in [(None, 1.0), (0.5, 0.5)]:
        task = replace(QUESTION, temperature=temperature)
        steps, _ = await play(chat, engine, ScriptedEnvironment([told("x", 1.0, True)]), task)
        assert (steps[0].temperature, engine.samplings[-1].temperature) == (wanted, wanted)


async def test_the_template_tells_the_policy_about_the_tools_of_a_task(tmp_path: Path) -> None:
    chat = templated(
        tmp_path,
        "{% for tool in tools or [] %}<|im_start|>tool {{ tool.name }}<|im_end|>{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    )
    engine = ScriptedEngine(chat, lambda words: "answer 17")
    task = replace(QUESTION, tools=({"name": "look"},))
    await play(chat, engine, ScriptedEnvironment([told("x", 1.0, True)]), task)
    assert chat.text(np.asarray(engine.prompts[0])) == "tool look user what is the age of fox ?"


async def test_a_finished_trajectory_has_the_sums_of_what_its_environment_returned_as_info(chat: Chat) -> None:
    first = StepResult([Message(role="user", content="17")], 0.25, False, {"searches": 1})
    last = StepResult([], 1.0, True, {"searches": 2, "right": 1})
    seen: list[TrajectoryResult] = []
    steps, end = await play(chat, "look fox age", ScriptedEnvironment([first, last]), observe=seen.append)
    assert end.info == '{"scripted":{"searches":3.0,"right":1.0}}'
    assert seen == [TrajectoryResult(end, "")]
    tokens = np.concatenate([part for step in steps for part in (step.prompt_ids, step.response_ids)])
    assert chat.text(tokens) == "user what is the age of fox ? assistant look fox age user 17 assistant look fox age"
    assert [(step.reward, step.extends is None) for step in steps] == [(0.25, True), (1.0, False)]


class Reuses(ScriptedEnvironment):
    """Says everything in one message that it changes."""

    message = Message(role="user", content="")

    async def step(self, text: str) -> StepResult:
        result = await super().step(text)
        self.message["content"] = result.messages[0]["content"]
        return result._replace(messages=[self.message])


@pytest.mark.parametrize("mode", ["append", "rerender"])
async def test_a_history_that_the_template_leaves_alone_is_extended_in_either_mode(chat: Chat, mode: str) -> None:
    engine = ScriptedEngine(chat, lambda words: "look fox age")
    steps, _ = await play(chat, engine, Reuses([told("17"), told("24"), told("x", 1.0, True)]), conversation=mode)
    assert [step.extends and step.extends.step for step in steps] == [None, 0, 1]
    assert [len(step.prompt_ids) for step in steps] == [12, 6, 6]
    assert whole_prompts(steps) == engine.prompts
    assert chat.text(np.asarray(engine.prompts[2])) == (
        "user what is the age of fox ? assistant look fox age user 17 assistant look fox age user 24 assistant"
    )


async def test_a_history_that_the_template_rewrites_is_sent_from_where_it_changed_and_measured_as_it_is(
    stripping_chat: Chat,
) -> None:
    engine = ScriptedEngine(stripping_chat, lambda words: "what is none look fox age")
    environment = ScriptedEnvironment(results := [told("17"), told("24"), told("x", 1.0, True)])
    # Third prompt: 12 + 2 * (3 words + 1 end + 6 of the observation and the opening) = 32; unstripped it would be 38.
    steps, end = await play(stripping_chat, engine, environment, conversation="rerender", max_input_length=32)
    assert [step.extends and step.extends[:2] for step in steps] == [None, (0, 12), (1, 22)]
    assert whole_prompts(steps) == engine.prompts
    assert stripping_chat.text(steps[2].prompt_ids) == "look fox age user 24 assistant"
    assert environment.heard == ["what is none look fox age"] * 3
    assert (end.n_steps, end.reward, end.stop_reason) == (3, 1.0, "stop")
    short = ScriptedEnvironment(results)
    _, end = await play(stripping_chat, engine, short, conversation="rerender", max_input_length=31)
    assert (end.n_steps, end.stop_reason) == (2, "length")


@pytest.mark.parametrize("words", ["look fox age", ""])
async def test_an_inline_response_is_closed_at_the_last_turn_allowed_and_where_it_has_no_token(
    chat: Chat, words: str
) -> None:
    engine = ScriptedEngine(chat, lambda _: generated(chat.plain(words).tolist(), sampled_end=False))
    environment = ScriptedEnvironment([told("17"), told("24")])
    steps, end = await play(chat, engine, environment, conversation="inline", max_turns=2)
    assert [step.response_ids[-1] == chat.end_id for step in steps] == [not words, True]
    assert [step.loss_mask.sum() for step in steps] == [len(words.split())] * 2 and end.stop_reason == "max_turns"
