"""Trajectories for people: a list, one in the terminal, and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.observe.trajectories import Record

Words = Callable[[Sequence[int]], list[str]]
"""The text that each of some token ids adds."""

CONTEXT_TOKENS = 4
"""Tokens before one that decide how it is written."""

PROMPT, LOSS, STALE, MASKED, UNUSED = "prompt", "loss", "stale", "masked", "unused"

STYLES = {PROMPT: "dim", LOSS: "green", STALE: "yellow", MASKED: "magenta", UNUSED: "blue"}

LEGEND = {
    PROMPT: "prompt or observation",
    LOSS: "sampled, carries loss",
    STALE: "sampled, too stale for loss",
    MASKED: "in the response, no loss (appended by code)",
    UNUSED: "sampled, but its group was not trained",
}


HARMLESS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
HARMLESS |= {127: 0x2421} | dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
"""Characters that would command a terminal, or turn the direction of text, by those that are shown instead."""


class Token(NamedTuple):
    """One token of a trajectory, as the trainer treats it."""

    text: str
    kind: str
    logprob: float | None
    version: str | None


def pieces(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text of the tokens before it; a lone decode would lose spaces.

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
    """The tokens that a step adds: its prompt, or what is new of it, then its response."""
    texts = [text.translate(HARMLESS) for text in words([*step["prompt_ids"], *step["response_ids"]])]
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
    return STALE if _step(record["trained_at"]) - _step(version) > max_staleness else LOSS


def _step(version: str) -> int:
    return int(version.partition(".")[2])


def print_list(console: Console, records: Sequence[Record]) -> None:
    """A line a trajectory."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("fate", no_wrap=True)
    for name in ("step", "return", "advantage", "turns", "rows", "loss tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended by")
    for record in records:
        table.add_row(
            record["id"],
            fate_of(record),
            str(record["optimizer_step"]),
            _number(record["return"], ".2f"),
            _number(record["advantage"], "+.2f"),
            str(len(record["steps"])),
            str(record["rows"]),
            f"{record['loss_tokens']}/{record['sampled_tokens']}",
            record["stop_reason"],
        )
    console.print(table)


def print_record(console: Console, record: Record, max_staleness: int, words: Words) -> None:
    """One trajectory, step by step; what carries loss is coloured."""
    console.print(Text(record["id"], style="bold"))
    console.print(Text(headline(record)))
    for kind, meaning in LEGEND.items():
        console.print(Text("  \u25a0 ", style=STYLES[kind]) + Text(meaning, style="dim"))
    for step in record["steps"]:
        console.print(Text(f"\nstep {step['index']}  {step_line(step)}", style="bold"))
        line = Text()
        for token in tokens_of(step, record, max_staleness, words):
            line.append(token.text, style=STYLES[token.kind])
        console.print(line)


def headline(record: Record) -> str:
    """What became of a trajectory, in a line."""
    trained = record["fate"] == "trained"
    when = (
        f"{'in' if trained else 'after'} optimizer step {record['optimizer_step']} (at policy {record['trained_at']})"
    )
    return (
        f"{fate_of(record)} {when}, return {_number(record['return'], 'g')}, "
        f"advantage {_number(record['advantage'], '+.3f')}, {_counted(len(record['steps']), 'turn')} in "
        f"{_counted(record['rows'], 'row')}, {record['loss_tokens']} of "
        f"{record['sampled_tokens']} sampled tokens carry loss, ended by {record['stop_reason']}"
    )


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def fate_of(record: Record) -> str:
    """`trained`, or the fate with its reason."""
    return f"{record['fate']} ({record['reason']})" if "reason" in record else str(record["fate"])


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def step_line(step: Record) -> str:
    """What is known of a step, in a line."""
    reward = step["reward"] if isinstance(step["reward"], int | float) else sum(step["reward"])
    versions = ", ".join(dict.fromkeys(version for _, version in step["versions"] if version)) or "none"
    return f"row {step['row']}, policy {versions}, reward {reward:g}, {step['stop_reason']}"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ --ink: #1f2430; --soft: #667085; --line: #dfe3ea; --page: #f5f6f8; --card: #fff;
  --loss: #d8f0e0; --stale: #fbe6c8; --masked: #ecdff5; --unused: #dbe7fb; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e9ef; --soft: #9aa4b5; --line: #323947; --page: #14171d;
  --card: #1c2029; --loss: #1f4a33; --stale: #553a12; --masked: #43305a; --unused: #21395f; }} }}
body {{ margin: 0 auto; max-width: 980px; padding: 20px 14px 60px; background: var(--page); color: var(--ink);
  overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 20px; }} h2 {{ font-size: 15px; margin: 0; overflow-wrap: anywhere; }}
details {{ background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; margin: 10px 0; }}
summary {{ cursor: pointer; display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; }}
summary span, p, .step {{ color: var(--soft); font-size: 13px; }}
.step {{ margin: 12px 0 2px; }}
.tokens {{ white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; }}
.tokens span {{ border-radius: 3px; }}
.prompt {{ color: var(--soft); }}
.loss {{ background: var(--loss); }} .stale {{ background: var(--stale); }} .masked {{ background: var(--masked); }}
.unused {{ background: var(--unused); }}
summary::before {{ content: "\\25b8"; color: var(--soft); }}
details[open] > summary::before {{ content: "\\25be"; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 8px; }}
.legend span {{ padding: 1px 6px; border-radius: 3px; }}
</style></head><body>
<h1>{title}</h1>
<p class="legend">{legend}</p>
{body}
</body></html>
"""


def html_page(title: str, records: Sequence[Record], max_staleness: int, words: Words) -> str:
    """All records on one page without external parts; everything from outside is escaped."""
    legend = "".join(f'<span class="{kind}">{escape(meaning)}</span>' for kind, meaning in LEGEND.items())
    body = "\n".join(_html_record(record, max_staleness, words) for record in records)
    return PAGE.format(title=escape(title), legend=legend, body=body)


def _html_record(record: Record, max_staleness: int, words: Words) -> str:
    parts = [
        f"<details><summary><h2>{escape(record['id'])}</h2>"
        f"<span>step {record['optimizer_step']}, return {_number(record['return'], 'g')}, "
        f"{escape(fate_of(record))}</span></summary>",
        f"<p>{escape(headline(record))}</p>",
    ]
    for step in record["steps"]:
        parts.append(f'<div class="step">step {step["index"]}: {escape(step_line(step))}</div><div class="tokens">')
        parts += [_html_token(token) for token in tokens_of(step, record, max_staleness, words)]
        parts.append("</div>")
    return "".join([*parts, "</details>"])


def _html_token(token: Token) -> str:
    facts: list[Any] = []
    if token.logprob is not None and token.kind != MASKED:
        facts.append(f"log-probability {token.logprob:.3f}")
    if token.version is not None:
        facts.append(f"policy {token.version}")
    title = f' title="{escape(", ".join(facts))}"' if facts else ""
    return f'<span class="{token.kind}"{title}>{escape(token.text)}</span>'
