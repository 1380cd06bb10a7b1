"""The tokens of a trajectory record with the text and the kind of each, and lines about records and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from service.errors import printable
from service.observe.trajectories.records import Record

Words = Callable[[Sequence[int]], list[str]]
"""From token ids to the text that each of them adds."""

PREVIEW_TOKENS = 60
CONTEXT_TOKENS = 4
"""Tokens before a token that may decide its text."""

PROMPT, LOSS, STALE, MASKED, UNUSED = "prompt", "loss", "stale", "masked", "unused"

LEGEND = {
    PROMPT: "prompt or observation",
    LOSS: "sampled, carries loss",
    STALE: "sampled, too stale for loss",
    MASKED: "in the response, no loss (appended by code)",
    UNUSED: "sampled, but its group was not trained",
}


class Token(NamedTuple):
    """One token of a trajectory; `kind` is how the trainer treats the token."""

    text: str
    kind: str
    logprob: float | None
    version: str | None


def pieces(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the tokens before it; decoding tokens one by one would lose spaces.

    >>> pieces(lambda ids: " ".join("abc"[i] for i in ids), [0, 2])
    ['a', ' c']
    """
    texts = []
    for i in range(len(token_ids)):
        start = max(0, i - CONTEXT_TOKENS)
        before, after = decode(token_ids[start:i]), decode(token_ids[start : i + 1])
        texts.append(after[len(before) :] if after.startswith(before) else decode([token_ids[i]]))
    return texts


def tokens_of(step: Record, record: Record, max_staleness: int, words: Words) -> Iterator[Token]:
    """The tokens that a step adds: the new part of its prompt, then its response."""
    texts = [printable(text) for text in words([*step["prompt_ids"], *step["response_ids"]])]
    n_prompt = len(step["prompt_ids"])
    for text in texts[:n_prompt]:
        yield Token(text, PROMPT, None, None)
    versions = [version for count, version in step["versions"] for _ in range(count)]
    logprobs = step["logprobs"] or [None] * len(versions)
    for text, mask, logprob, version in zip(texts[n_prompt:], step["loss_mask"], logprobs, versions, strict=True):
        yield Token(text, _kind(mask, version, record, max_staleness), logprob, version)


def _kind(mask: int, version: str | None, record: Record, max_staleness: int) -> str:
    if not mask or version is None:
        return MASKED
    if record["fate"] != "trained":
        return UNUSED
    return STALE if _steps_of(record["trained_at"]) - _steps_of(version) > max_staleness else LOSS


def staleness(record: Record) -> int | None:
    """The largest staleness of a sampled token when the trajectory was trained; None without such a token."""
    versions = {version for step in record["steps"] for _, version in step["versions"] if version is not None}
    return max((_steps_of(record["trained_at"]) - _steps_of(version) for version in versions), default=None)


def _steps_of(version: str) -> int:
    """The optimizer steps of a policy version: `1:36` -> 36."""
    return int(version.partition(":")[2])


def preview(record: Record, words: Words) -> str:
    """The beginning of the last response, in one line."""
    if not record["steps"]:
        return ""
    text = printable("".join(words(record["steps"][-1]["response_ids"][:PREVIEW_TOKENS])))
    return " ".join(text.split())


def headline(record: Record) -> str:
    """The fate of a trajectory in one line."""
    when = "in" if record["fate"] == "trained" else "after"
    return (
        f"{fate_of(record)} {when} optimizer step {record['optimizer_step']} (at policy {record['trained_at']}), "
        f"return {number(record['return'], 'g')}, advantage {number(record['advantage'], '+.3f')}, "
        f"{_counted(len(record['steps']), 'turn')} in {_counted(record['rows'], 'row')}, {record['loss_tokens']} of "
        f"{record['sampled_tokens']} sampled tokens carry loss, ended by {record['stop_reason']}"
    )


def fate_of(record: Record) -> str:
    """`trained`, or the fate with its reason."""
    return f"{record['fate']} ({record['reason']})" if "reason" in record else str(record["fate"])


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def number(value: float | None, form: str) -> str:
    """A number in this format; a record without it has none."""
    return "none" if value is None else format(value, form)


def step_line(step: Record) -> str:
    """Row, policy versions, reward and stop reason of a step in one line."""
    reward = step["reward"] if isinstance(step["reward"], int | float) else sum(step["reward"])
    versions = ", ".join(dict.fromkeys(version for _, version in step["versions"] if version)) or "none"
    return f"row {step['row']}, policy {versions}, reward {reward:g}, {step['stop_reason']}"
