"""Encodes and decodes the reply of a scorer's process about a group. The bytes are no pickle, because unpickling could
run a scorer's code in the buffer's process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np

from service.handoff.ledger.scores import LOGPROBS
from service.handoff.scoring import Answer
from service.rollout.plain_values import as_float
from service.types import RefusalReason


class Failure(StrEnum):
    """Reasons for which a scorer gave no valid answer; each reason is also a label value of the metric of failures."""

    START = "start"
    """The scorer's process did not start."""
    DEADLINE = "deadline"
    DIED = "died"
    RAISED = "raised"
    HTTP = "http"
    """The scorer's address did not answer, or answered with an error."""
    MALFORMED = "malformed"
    """The answer does not have the required form."""
    TOO_LARGE = "too_large"


REASONS = (*Failure, RefusalReason.LENGTH_MISMATCH, RefusalReason.REWARD, RefusalReason.LOGPROB)
"""All reasons for which a scorer's answer may count as a failure: no valid answer, or an answer that is refused."""


Logprobs = Callable[[list[int]], Awaitable[Sequence[float | None]]]
"""A function from token ids to the log-probability of each token given the tokens before it, at temperature 1; the
first value is not used."""


class ScorerFailed(Exception):
    """A scorer gave no valid answer about a group."""

    def __init__(self, reason: Failure | RefusalReason, detail: str) -> None:
        super().__init__(reason, detail)  # keeps the arguments, so that Ray can send the error
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class ScoreReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer of a scorer: log-probabilities from a teacher, rewards from any other scorer."""

    rewards: list[float] | None = None
    info: list[str] = []
    logprobs: bytes | None = None


MAX_REPLY_BYTES = 1 << 20
"""Maximum bytes of a reply without its log-probabilities; a larger reply is not decoded."""

_replies = msgspec.msgpack.Decoder(ScoreReply)


def encode_answer(answer: Answer) -> bytes:
    """Encode an answer as the bytes of a reply."""
    logprobs = answer.logprobs
    as_bytes = None if logprobs is None else np.ascontiguousarray(logprobs, LOGPROBS).tobytes()
    rewards = None if answer.rewards is None else [float(reward) for reward in answer.rewards]
    return msgspec.msgpack.encode(ScoreReply(rewards, [*answer.info], as_bytes))


def answer_from(data: object, room: int) -> Answer:
    """Decode a reply; its log-probabilities may take up to `room` bytes.

    Raises:
        ScorerFailed: the bytes are not a reply, or there are too many bytes.
    """
    if not isinstance(data, bytes):
        raise ScorerFailed(Failure.MALFORMED, f"a {type(data).__name__}, not bytes")
    if len(data) > MAX_REPLY_BYTES + room:
        raise ScorerFailed(Failure.TOO_LARGE, f"{len(data)} bytes")
    try:
        reply = _replies.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ScorerFailed(Failure.MALFORMED, str(error)[:200]) from error
    if reply.logprobs is not None and len(reply.logprobs) % LOGPROBS.itemsize:
        raise ScorerFailed(Failure.MALFORMED, f"{len(reply.logprobs)} bytes are no float32 numbers")
    logprobs = None if reply.logprobs is None else np.frombuffer(reply.logprobs, LOGPROBS)
    return Answer(reply.rewards, reply.info, logprobs)


def answer_of(given: Any, n_trajectories: int) -> Answer:
    """Read the answer of a user's code: `rewards`, or `(rewards, info)`, each with one entry per
    trajectory; `info` may be empty.

    Raises:
        ScorerFailed: the answer has another form, or another number of rewards.
    """
    try:
        both = isinstance(given, tuple) and len(given) == 2 and np.ndim(given[0]) > 0  # otherwise these are two rewards
        rewards, info = given if both else (given, ())
        if isinstance(rewards, str | bytes | dict) or isinstance(info, str | bytes | dict):
            raise TypeError(f"{type(rewards).__name__} and {type(info).__name__} are no lists")
        if len(rewards) != n_trajectories or len(info) not in (0, n_trajectories):
            raise TypeError(f"{len(rewards)} rewards and {len(info)} infos of {n_trajectories} trajectories")
        # NaN, which a missing reward becomes, removes only its trajectory.
        numbers, texts = [as_float(reward) for reward in rewards], [_text(each) for each in info]
    except (TypeError, ValueError) as error:
        raise ScorerFailed(Failure.MALFORMED, str(error)[:200]) from error
    return Answer(numbers, texts)


def _text(info: object) -> str:
    """A text unchanged; other values as JSON."""
    if isinstance(info, str):
        return info.encode(errors="replace").decode()
    return "" if info is None else msgspec.json.encode(info).decode()
