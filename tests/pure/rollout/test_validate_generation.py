"""An engine whose answer cannot be one: its trajectory is lost with a counted reason, and nothing is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.examples import lookup
from service.agents.conversation_tree import ConversationTree
from service.agents.messages_and_replies import JsonCalls
from service.config import GeneratorConfig
from service.handoff.steps.values import StopReason
from service.rollout.agent_loop import TrajectoryResult
from service.rollout.chat.chat import Chat, MessagesRefused, load_chat
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.engine import Generation, Mode
from tests.pure.rollout.conftest import ScriptedEngine, ScriptedEnvironment, generated, leave_ids_out, play, told

THREE = generated([5, 6, 7])
PROMPT_TOKENS = 200
"""More than the question has."""


def three(**columns: Any) -> Generation:
    """Three tokens, with these columns in place of good ones."""
    kinds = {"versions": np.int64, "routed_experts": np.int16, "support_size": np.uint16, "support": np.int32}
    return replace(THREE, **{name: np.asarray(of, kinds.get(name, np.float32)) for name, of in columns.items()})


WRONG: dict[str, Generation] = {
    "2 log-probabilities for 3 tokens": three(logprobs=[-1, -1]),
    "4 log-probabilities for 3": three(logprobs=[-1] * 4),
    "0 log-probabilities for 3 tokens": three(logprobs=[]),
    "3 x 2 log-prob": three(logprobs=np.zeros((3, 2))),
    "the log-probability 0.5": three(logprobs=[np.nan, 0.5, -1]),
    "the log-probability inf": three(logprobs=[-1, np.inf, -1]),
    "no finite log-probability": three(logprobs=[np.nan] * 3),
    "2 versions for 3 tokens": three(versions=[1, 1]),
    "tokens of no policy version": three(versions=[1, -1, 1]),
    "the token -6 of a vocabulary": generated([5, -6, 7]),
    "the token 1048576 of a vocabulary": generated([5, 1 << 20]),
    "8 tokens, 7 were asked for": generated([5] * 8, "length", sampled_end=False),
    "no token, but the end 'stop'": generated([], "stop", sampled_end=True),
    "no token, but the end 'length'": generated([], "length", sampled_end=False),
    "ended for the reason 'error'": replace(THREE, stop_reason="error"),
    "ended for the reason None": replace(THREE, stop_reason=None),  # type: ignore[arg-type]
    "200 x 2 x 1 routed": three(routed_experts=np.zeros((PROMPT_TOKENS, 2, 1))),
    "5 x 2 routed experts": three(routed_experts=np.zeros((5, 2))),
    "drawn from 513 tokens or more: set generator.top_k": three(support_size=[1, 513, 2], support=[9]),
    "2 sizes and 1 ids of supports for 3 tokens": three(support_size=[1, 2], support=[9]),
    "3 sizes and 1 ids of supports for 3": three(support_size=[1, 2, 2], support=[9]),
    "3 sizes and None ids of supports for 3": three(support_size=[1, 1, 1]),
    "the token -1 of a vocabulary": three(support_size=[1, 1, 2], support=[-1]),
    "the token 69 of a vocabulary of 69": three(support_size=[0, 1, 2], support=[69]),
    "5 x 0 x 2 routed experts": three(routed_experts=np.zeros((5, 0, 2))),
}


@pytest.mark.parametrize("mode", ["append", "rerender", "inline"])
@pytest.mark.parametrize("why", WRONG)
async def test_an_answer_that_cannot_be_one_costs_its_own_trajectory_and_says_why(
    chat: Chat, why: str, mode: Mode
) -> None:
    turns = iter(["look fox age", WRONG[why]])
    engine = ScriptedEngine(chat, lambda words: next(turns))  # type: ignore[arg-type]
    environment = ScriptedEnvironment([told("17", 0.5), told("never", 1.0)])
    seen: list[TrajectoryResult] = []
    steps, end = await play(chat, engine, environment, observe=seen.append, conversation=mode)
    assert (len(steps), end.n_steps, end.stop_reason) == (1, 1, "engine_output")
    assert (len(environment.heard), environment.closed) == (1, 1)
    assert why in seen[0].failure and "turn=1" in seen[0].failure


async def test_what_an_engine_may_answer_is_made_a_step(chat: Chat) -> None:
    """Single log-probabilities that are not finite are the buffer's, which masks and counts those tokens."""
    for answer in (
        three(logprobs=[-1, np.nan, -np.inf]),
        replace(generated([5], "length", sampled_end=False), logprobs=np.array([np.nan], np.float32)),
        three(logprobs=[5e-5, 0, -1], routed_experts=np.zeros((3, 2, 1))),
        generated([5] * 7, "length", sampled_end=False),
        generated([], "stop", sampled_end=False),
        generated([chat.vocab_size - 1]),
    ):
        engine = ScriptedEngine(chat, lambda words, answer=answer: answer)  # type: ignore[misc]
        (step,), end = await play(chat, engine, ScriptedEnvironment([told("x", 1.0, True)]))
        assert end.stop_reason == (StopReason.TRUNCATED if answer.stop_reason == "length" else StopReason.STOP)
        assert np.array_equal(step.logprobs[: len(answer.logprobs)], answer.logprobs, equal_nan=True)  # type: ignore[index]


async def test_a_token_is_any_id_of_the_models_head_also_one_that_the_tokenizer_leaves_out(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    tokens = len(load_tokenizer(tmp_path))
    leave_ids_out(tmp_path, 5)
    alone = load_chat(tmp_path, GeneratorConfig())
    assert alone.vocab_size == tokens + 5
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": tokens + 64}))
    padded = load_chat(tmp_path, GeneratorConfig())
    answer = generated([tokens + 1, tokens + 63, padded.end_id])
    engine = ScriptedEngine(padded, lambda words: answer)
    (step,), end = await play(padded, engine, ScriptedEnvironment([told("x", 1.0, True)]))
    assert (end.stop_reason, step.response_ids.tolist()) == ("stop", answer.token_ids.tolist())
    assert step.loss_mask.all()
    ConversationTree(padded, JsonCalls()).open_ids(answer.token_ids)
    with pytest.raises(MessagesRefused, match=f"vocabulary of {tokens + 64}"):
        ConversationTree(padded, JsonCalls()).open_ids(answer.token_ids + 1)
    engine = ScriptedEngine(padded, lambda words: generated([padded.vocab_size]))
    _, end = await play(padded, engine, ScriptedEnvironment([told("x", 1.0, True)]))
    assert end.stop_reason == "engine_output"
