"""Writes trajectory records as an HTML page that needs no other files: a table to filter and sort, and each
trajectory's tokens."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from service.errors import printable
from service.run.records.trajectories import Record
from service.trace.tokens import (
    LEGEND,
    MASKED,
    Token,
    Words,
    fate_of,
    headline,
    number,
    preview,
    scored,
    staleness,
    step_line,
    tokens_of,
    weights,
)

PAGE = Path(__file__).with_name("trajectories_page.html")
COLUMNS = 9


def html_page(title: str, records: Sequence[Record], kept: int, max_staleness: int, words: Words) -> str:
    """An HTML page with these records, which are some or all of the run's `kept` records. The page needs no other file.

    All text of records is escaped, and the page's content security policy allows only the page's own script.
    """
    page = PAGE.read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    legend = (f'<span class="{kind}">{escape(meaning)}</span>' for kind, meaning in LEGEND.items())
    bodies = (_body(order, record, max_staleness, words) for order, record in enumerate(records))
    made = Template(page).substitute(
        title=escape(title),
        hash=f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}",
        legend="".join(legend),
        fates=_options(record["fate"] for record in records),
        stops=_options(record["stop_reason"] for record in records),
        count=len(records),
        kept=kept,
        body="\n".join(bodies),
    )
    return printable(made)


def _options(names: Iterable[str]) -> str:
    return "".join(f"<option>{escape(name)}</option>" for name in sorted(set(names)))


def _body(order: int, record: Record, max_staleness: int, words: Words) -> str:
    """The HTML of a trajectory: its line in the table, and below it its tokens, hidden at first."""
    oldest = staleness(record)
    facts = {
        "order": order,
        "fate": record["fate"],
        "return": "" if record["return"] is None else record["return"],
        "turns": len(record["steps"]),
        "length": record["sampled_tokens"],
        "staleness": "" if oldest is None else oldest,
        "stop": record["stop_reason"],
    }
    cells = (
        ("step", "number", str(record["optimizer_step"])),
        ("fate", "", fate_of(record)),
        ("return", "number", number(record["return"], "g")),
        ("turns", "number", str(facts["turns"])),
        ("tokens", "number", str(facts["length"])),
        ("staleness", "number", "none" if oldest is None else str(oldest)),
        ("ended by", "", record["stop_reason"]),
    )
    return "".join(
        [
            "<tbody", *(f' data-{name}="{escape(str(fact))}"' for name, fact in facts.items()), ">",
            '<tr class="row" tabindex="0" aria-expanded="false">', f'<td class="id">{escape(record["id"])}</td>',
            *(f'<td data-name="{name}" class="{kind}">{escape(text)}</td>' for name, kind, text in cells),
            f'<td class="preview"><div>{escape(preview(record, words))}</div></td></tr>',
            f'<tr class="detail" hidden><td colspan="{COLUMNS}">',
            *(f"<p>{escape(said)}</p>" for said in (headline(record), *scored(record))),
            *_sections(record, max_staleness, words), "</td></tr></tbody>",
        ]
    )  # fmt: skip


def _sections(record: Record, max_staleness: int, words: Words) -> Iterator[str]:
    """The HTML of a trajectory's steps, and of the transcript of an agent's run, which is collapsed."""
    for step in record["steps"]:
        tokens = "".join(map(_token, tokens_of(step, record, max_staleness, words)))
        title = escape(f"step {step['index']}: {step_line(step)}")
        yield f'<div class="step">{title}</div><div class="tokens">{tokens}</div>'
    if transcript := record["transcript"]:
        text = escape(printable(transcript))
        yield f'<details><summary class="step">transcript</summary><div class="tokens">{text}</div></details>'


def _token(token: Token) -> str:
    notes = []
    if token.logprob is not None and token.kind != MASKED:
        notes.append(f"log-probability {token.logprob:.3f}")
    if token.version is not None:
        notes.append(weights(token.version))
    title = f' title="{escape(", ".join(notes))}"' if notes else ""
    return f'<span class="{token.kind}"{title}>{escape(token.text)}</span>'
