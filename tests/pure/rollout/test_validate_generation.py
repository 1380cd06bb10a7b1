"""An engine whose answer cannot be one: its trajectory is lost with a counted reason, and nothing is made of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from service.handoff.steps.values import StopReason
from service.rollout.agent_loop import Played
from service.rollout.chat.chat import Chat
from service.rollout.chat.conversation import Mode
from service.rollout.engine import Generation
from tests.pure.rollout.conftest import ScriptedEngine, ScriptedEnvironment, generated, play, told

THREE = generated([5, 6, 7])
PROMPT_TOKENS = 200
"""More than the question has."""


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def versions(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def experts(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int16)


WRONG: dict[str, tuple[Generation, str]] = {
    "one log-probability too few": (replace(THREE, logprobs=floats(-1, -1)), "2 log-probabilities for 3 tokens"),
    "one log-probability too many": (replace(THREE, logprobs=floats(-1, -1, -1, -1)), "4 log-probabilities for 3"),
    "no log-probabilities": (replace(THREE, logprobs=floats()), "0 log-probabilities for 3 tokens"),
    "log-probabilities of a table": (replace(THREE, logprobs=np.zeros((3, 2), np.float32)), "3 x 2 log-prob"),
    "a positive log-probability": (replace(THREE, logprobs=floats(-1, 0.5, -1)), "the log-probability 0.5"),
    "a positive one beside NaN": (replace(THREE, logprobs=floats(np.nan, 0.5, -1)), "the log-probability 0.5"),
    "an infinite log-probability": (replace(THREE, logprobs=floats(-1, np.inf, -1)), "the log-probability inf"),
    "none but NaN": (replace(THREE, logprobs=floats(*[np.nan] * 3)), "no finite log-probability"),
    "a version too few": (replace(THREE, versions=versions(1, 1)), "2 versions for 3 tokens"),
    "a token of no version": (replace(THREE, versions=versions(1, -1, 1)), "tokens of no policy version"),
    "a negative token": (generated([5, -6, 7]), "the token -6 of a vocabulary"),
    "a token out of the vocabulary": (generated([5, 1 << 20]), "the token 1048576 of a vocabulary"),
    "more tokens than asked for": (generated([5] * 8, "length", sampled_end=False), "8 tokens, 7 were asked for"),
    "far more tokens than fit": (generated([5] * 500, "length", sampled_end=False), "500 tokens, 7 were asked"),
    "an end without a token": (generated([], "stop", sampled_end=True), "no token, but the end 'stop'"),
    "a limit that nothing reached": (generated([], "length", sampled_end=False), "no token, but the end 'length'"),
    "an error as the end": (replace(THREE, stop_reason="error"), "ended for the reason 'error'"),
    "no reason for the end": (replace(THREE, stop_reason=None), "ended for the reason None"),  # type: ignore[arg-type]
    "experts of more tokens": (replace(THREE, routed_experts=experts(PROMPT_TOKENS, 2, 1)), "200 x 2 x 1 routed"),
    "experts without layers": (replace(THREE, routed_experts=experts(5, 2)), "5 x 2 routed experts"),
    "experts of no layer": (replace(THREE, routed_experts=experts(5, 0, 2)), "5 x 0 x 2 routed experts"),
}


@pytest.mark.parametrize("mode", ["append", "rerender", "inline"])
@pytest.mark.parametrize("name", WRONG)
async def test_an_answer_that_cannot_be_one_costs_its_own_trajectory_and_says_why(
    chat: Chat, name: str, mode: Mode
) -> None:
    answer, why = WRONG[name]
    turns = iter(["look fox age", answer])
    engine = ScriptedEngine(chat, lambda words: next(turns))  # type: ignore[arg-type]
    environment = ScriptedEnvironment([told("17", 0.5), told("never", 1.0)])
    seen: list[Played] = []
    steps, end = await play(chat, engine, environment, observe=seen.append, conversation=mode)
    assert (len(steps), end.n_steps, end.stop_reason) == (1, 1, "engine_output")
    assert (len(environment.heard), environment.closed) == (1, 1)
    assert why in seen[0].failure and "turn=1" in seen[0].failure


@pytest.mark.parametrize(
    "answer",
    [
        replace(THREE, logprobs=floats(-1, np.nan, -np.inf)),
        replace(generated([5], "length", sampled_end=False), logprobs=floats(np.nan)),
        replace(THREE, logprobs=floats(5e-5, 0, -1)),
        replace(THREE, routed_experts=experts(3, 2, 1)),
        generated([5] * 7, "length", sampled_end=False),
        generated([], "stop", sampled_end=False),
    ],
)
async def test_what_an_engine_may_answer_is_made_a_step(chat: Chat, answer: Generation) -> None:
    """Single log-probabilities that are not finite are the buffer's, which masks and counts those tokens."""
    engine = ScriptedEngine(chat, lambda words: answer)
    (step,), end = await play(chat, engine, ScriptedEnvironment([told("x", 1.0, True)]))
    assert end.stop_reason == (StopReason.TRUNCATED if answer.stop_reason == "length" else StopReason.STOP)
    assert np.array_equal(step.logprobs[: len(answer.logprobs)], answer.logprobs, equal_nan=True)  # type: ignore[index]


async def test_the_vocabulary_is_the_tokenizers(chat: Chat) -> None:
    for token, reason in ((chat.vocab_size - 1, "stop"), (chat.vocab_size, "engine_output")):
        engine = ScriptedEngine(chat, lambda words, token=token: generated([token]))  # type: ignore[misc]
        _, end = await play(chat, engine, ScriptedEnvironment([told("x", 1.0, True)]))
        assert end.stop_reason == reason
