"""Shows the `/status` document on a terminal: a line for each part of the data flow, and for each wait."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from service.errors import UserError
from service.observe.status_document import Status
from service.observe.summary import duration, fates_in_words, summary_lines

LABEL_WIDTH = 11


ODD = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError)
"""Errors that reading a document may raise if something in it is missing or has another type."""


def status_lines(status: Status, width: int | None = None) -> list[str]:
    """The lines about a running or an ended run, wrapped to `width` columns. `UserError` if the document does not have
    the form of this version."""
    try:
        return _lines(status, width)
    except ODD as error:
        what = "summary" if "summary" in status else "status"
        raise UserError(f"this is no {what} that this version of Baton can show ({error!r:.200}); try --json") from None


def _lines(status: Status, width: int | None) -> list[str]:
    if "summary" in status:
        first, *rest = summary_lines(status["summary"])
        return [f"{status['folder']}: {first}", *(f"  {line}" for line in rest)]
    details = (f"  {label:<{LABEL_WIDTH}}{text}" for label, text in _details(status))
    lines = [headline(status), "", *details]
    return lines if width is None else [part for line in lines for part in _wrapped(line, width)]


def headline(status: Status) -> str:
    """Name, state and progress of the run in one line."""
    run, version = status["run"], status["policy_version"]
    steps = f"{version['step']} of {run['max_steps']}" if "max_steps" in run else f"{version['step']}"
    since = f", {duration(status['time'] - run['started'])}" if "started" in run else ""
    left = f", {duration(run['seconds_left'])} left" if run.get("seconds_left") else ""
    state = status["state"].replace("_", " ")
    restarted = f", the trainer began {version['incarnation']} times" if version["incarnation"] > 1 else ""
    return f"{run.get('name', 'run')}: {state}, step {steps}{restarted}{since}{left}"


def _details(status: Status) -> Iterator[tuple[str, str]]:
    """(label, text) of each line below the headline, in the order of the data flow."""
    run, buffer, step, now = status["run"], status["buffer"], status["step"], status["time"]
    prompts = f"{_number(buffer.get('issued'))} given out"
    if by_success := buffer.get("prompts"):
        passed_over = _number(buffer.get("passed_over"))
        prompts += f"; {_counts(by_success)} (success so far, by the band); {passed_over} passed over"
    yield "prompts", prompts
    up = sum(actor["role"] == "generator" and actor["state"] == "up" for actor in status["actors"])
    of_all = f" of {run['generators']}" if "generators" in run else ""
    tokens, idle = _number(buffer.get("tokens_per_second")), _percent(step.get("async/generator_wait_fraction"))
    yield "generators", f"{up}{of_all} up, {tokens} tokens/s, idle {idle}"
    if sessions := status.get("agents", {}).get("sessions"):
        ages = {state: age for state, age in status["agents"].get("oldest_seconds", {}).items() if age}
        oldest = ", ".join(f"{duration(age)} ({state})" for state, age in ages.items())
        yield "agents", f"sessions: {_counts(sessions) or 'none'}" + (f"; the oldest: {oldest}" if oldest else "")
    if by_state := _counts(buffer.get("groups", {})):
        yield "groups", by_state
    if tokens := fates_in_words(status["tokens"]):
        yield "tokens", tokens
    for name, scorer in buffer.get("scorers", {}).items():
        groups = {what: scorer[what] for what in ("waiting", "scored", "fallbacks", "refused")}
        last = f"; last failure: {scorer['last_failure']}" if scorer["last_failure"] else ""
        yield "scorer", f"{name}: {_counts(groups) or 'no group yet'}{last}"
    seconds, waited = _number(step.get("timing/step"), 2), _percent(step.get("async/trainer_wait_fraction"))
    stale, sync = _number(step.get("async/staleness_mean"), 2), _number(run.get("weights_sync_seconds"), 2)
    yield "trainer", f"newest step {seconds} s, waited {waited}, staleness {stale}, weights synced in {sync} s"
    if "reward/avg_raw_reward" in step:
        length = _number(step.get("generate/avg_response_length"), 1)
        ago = f", {duration(now - run['stepped'])} ago" if "stepped" in run else ""
        yield "last step", f"reward {_number(step['reward/avg_raw_reward'], 3)}, {length} tokens a response{ago}"
    if run.get("failing"):
        yield "failing", run["failing"]
    if run.get("not_learning"):
        yield "learning", f"may not happen: {run['not_learning']}"
    if store := run.get("store"):
        held = "no checkpoint" if store["step"] is None else f"the checkpoint of step {store['step']}"
        yield "store", f"{store['url']} has {held}" + (f"; {store['failing']}" if store["failing"] else "")
    if found := status.get("binding"):
        yield "binds", found["sentence"]
    for wait in status["waits"]:
        detail = f": {wait['detail']}" if wait["detail"] else ""
        what = f"{wait['reason']}{detail}"
        # a claim may wait while its generator plays open groups
        what = f"one more group ({what})" if wait["who"].startswith("generator") else what
        yield "waits", f"{wait['who']} for {what}, {duration(now - wait['since'])}"
    if silent := [actor["ident"] for actor in status["actors"] if actor["state"] != "up"]:
        yield "silent", ", ".join(silent)


def _wrapped(line: str, width: int) -> list[str]:
    indent = " " * (LABEL_WIDTH + 2)
    return textwrap.wrap(line, max(width, 2 * len(indent)), subsequent_indent=indent, break_on_hyphens=False) or [""]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)


def _number(value: Any, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
