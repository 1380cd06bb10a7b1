"""Trajectory records on a self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from service.observe.trajectories.records import Record
from service.observe.trajectories.tokens import (
    LEGEND,
    MASKED,
    Token,
    Words,
    fate_of,
    headline,
    number,
    step_line,
    tokens_of,
)

PAGE = Path(__file__).with_name("page.html")


def html_page(title: str, records: Sequence[Record], max_staleness: int, words: Words) -> str:
    """All records on one page without external parts; all text from records is escaped."""
    legend = "".join(f'<span class="{kind}">{escape(meaning)}</span>' for kind, meaning in LEGEND.items())
    body = "\n".join(_html_record(record, max_staleness, words) for record in records)
    page = Template(PAGE.read_text(encoding="utf-8"))
    return page.substitute(title=escape(title), legend=legend, body=body)


def _html_record(record: Record, max_staleness: int, words: Words) -> str:
    parts = [
        f"<details><summary><h2>{escape(record['id'])}</h2>"
        f"<span>step {record['optimizer_step']}, return {number(record['return'], 'g')}, "
        f"{escape(fate_of(record))}</span></summary>",
        f"<p>{escape(headline(record))}</p>",
    ]
    for step in record["steps"]:
        parts.append(f'<div class="step">step {step["index"]}: {escape(step_line(step))}</div><div class="tokens">')
        parts += [_html_token(token) for token in tokens_of(step, record, max_staleness, words)]
        parts.append("</div>")
    return "".join([*parts, "</details>"])


def _html_token(token: Token) -> str:
    notes = []
    if token.logprob is not None and token.kind != MASKED:
        notes.append(f"log-probability {token.logprob:.3f}")
    if token.version is not None:
        notes.append(f"policy {token.version}")
    title = f' title="{escape(", ".join(notes))}"' if notes else ""
    return f'<span class="{token.kind}"{title}>{escape(token.text)}</span>'
