"""The tokens of a trajectory record, each with its text and its kind; and lines of text about records and steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from service.errors import printable
from service.run.records.trajectories import Record

Words = Callable[[Sequence[int]], list[str]]
"""A function from token ids to the text that each token adds to the tokens before it."""

PREVIEW_TOKENS = 60
CONTEXT_TOKENS = 4
"""Number of preceding tokens that may affect a token's text."""

PROMPT, LOSS, STALE, MASKED, ASIDE, UNUSED = "prompt", "loss", "stale", "masked", "aside", "unused"

LEGEND = {
    PROMPT: "prompt or observation",
    LOSS: "sampled, carries loss",
    STALE: "sampled, too stale for loss",
    MASKED: "in the response, no loss (appended by code)",
    ASIDE: "sampled, but the role of its step is not trained",
    UNUSED: "sampled, but its group was not trained",
}


class Token(NamedTuple):
    """One token of a trajectory; `kind` names the trainer's treatment of the token."""

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
        yield Token(text, _kind(mask, version, step, record, max_staleness), logprob, version)


def _kind(mask: int, version: str | None, step: Record, record: Record, max_staleness: int) -> str:
    if not mask or version is None:
        return MASKED
    if not step["trains"]:
        return ASIDE
    if record["fate"] != "trained":
        return UNUSED
    return STALE if _steps_of(record["trained_at"]) - _steps_of(version) > max_staleness else LOSS


def staleness(record: Record) -> int | None:
    """The largest staleness of a sampled token when the trajectory was trained; None if no token has a staleness."""
    versions = {version for step in record["steps"] for _, version in step["versions"] if version is not None}
    return max((_steps_of(record["trained_at"]) - _steps_of(version) for version in versions), default=None)


def _steps_of(version: str) -> int:
    """The number of optimizer steps in a printed policy version: `1:36` -> 36."""
    return int(version.partition(":")[2])


def preview(record: Record, words: Words) -> str:
    """The beginning of the last response, in one line."""
    if not record["steps"]:
        return ""
    text = printable("".join(words(record["steps"][-1]["response_ids"][:PREVIEW_TOKENS])))
    return " ".join(text.split())


def weights(version: str) -> str:
    """A policy version, given as records print it, in words.

    >>> weights("1:97")
    'weights of step 97'
    """
    return f"weights of step {version.partition(':')[2]}"


def headline(record: Record) -> str:
    """The fate of a trajectory in one line."""
    when = "in" if record["fate"] == "trained" else "after"
    mean = "mean " if any("advantage" in step for step in record["steps"]) else ""
    return (
        f"{fate_of(record)} {when} optimizer step {record['optimizer_step']} (of the {weights(record['trained_at'])}), "
        f"return {number(record['return'], 'g')}, {mean}advantage {number(record['advantage'], '+.3f')}, "
        f"{_counted(len(record['steps']), 'turn')} in {_counted(record['rows'], 'row')}, {record['loss_tokens']} of "
        f"{record['sampled_tokens']} sampled tokens carry loss, ended by {record['stop_reason']}"
    )


def fate_of(record: Record) -> str:
    """The fate of a trajectory in words: `trained`, or another fate with its reason."""
    return f"{record['fate']} ({record['reason']})" if "reason" in record else str(record["fate"])


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def number(value: float | None, form: str) -> str:
    """The number as text in the format `form`; `none` if the value is None."""
    return "none" if value is None else format(value, form)


def step_line(step: Record) -> str:
    """A step in one line: role, the step that it continues (if not the step before), row, weights, reward, advantage
    (if the step has its own), and stop reason."""
    reward = step["reward"] if isinstance(step["reward"], int | float) else sum(step["reward"])
    versions = ", ".join(dict.fromkeys(weights(version) for _, version in step["versions"] if version)) or "not sampled"
    role = "" if step["role"] == "main" else f"{step['role']}, "
    own = f", advantage {step['advantage']:+.3f}" if "advantage" in step else ""
    place = ""
    if step["index"] and step["parent"] is None:
        place = "begins anew, "
    elif step["index"] and step["parent"] != step["index"] - 1:
        place = f"continues step {step['parent']}, "
    begins = ""
    if shared := step["begins_as"]:
        begins = f", begins with the first {_counted(shared[1], 'token')} of step {shared[0]}"
    return f"{role}{place}row {step['row']}, {versions}, reward {reward:g}{own}, {step['stop_reason']}{begins}"


def scored(record: Record) -> list[str]:
    """The answer of each scorer, one per line: `judge: reward 0.7, brief`; a teacher gives no reward."""
    lines = []
    for name, score in record["scores"].items():
        if score["fallback"]:
            lines.append(f"{name}: no good answer ({score['fallback']})")
        elif score["reward"] is not None:
            lines.append(f"{name}: reward {score['reward']:g}" + (f", {score['info']}" if score["info"] else ""))
    return lines
