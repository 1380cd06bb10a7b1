"""Refuses settings of a command that is run as an agent, where they cannot work."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from service.config.command import AGENT, OWN_VARIABLES, PLACEHOLDERS
from service.config.problem import Problem
from service.config.tree import Config
from service.user_code import is_module_and_name

LAST_PORT = 65535


def check_command(config: Config) -> Iterator[Problem]:
    """Every problem of the command, in the order of its settings."""
    env = config.env
    yield from _outside(config)
    if env.name == AGENT and not env.command and env.workers == "here":
        yield Problem(
            "env.command", f"is empty, so env.name={AGENT} has nothing to run; give a program and its arguments"
        )
    if env.name != AGENT and env.command:
        yield Problem("env.command", f"would never run, because env.name is {env.name!r}; set env.name={AGENT}")
    seconds = env.limits.seconds + env.limits.score_seconds
    if env.name == AGENT and config.endpoint is not None and config.endpoint.deadline < seconds:
        yield Problem(
            "env.limits.seconds",
            f"with score_seconds ({seconds:g} together) exceeds agents.deadline ({config.endpoint.deadline:g}): a slow "
            "run would be lost before it is scored; lower it, or raise agents.deadline",
        )
    yield from _no_words("env.command", env.command)
    yield from _no_words("env.score", env.score if isinstance(env.score, tuple) else ())
    yield from _no_words("env.variables", (*env.variables, *env.variables.values()))
    yield from _unknown_placeholders("env.command", env.command)
    if isinstance(env.score, tuple):
        if not env.score:
            yield Problem("env.score", "is an empty command; give a program and its arguments, or null")
    elif env.score is not None and (wrong := _not_loaded(env.score, env.trusted_modules)):
        yield Problem("env.score", wrong)
    for name in env.variables:
        if not name or "=" in name:
            yield Problem("env.variables", f"{name!r} is no name of an environment variable; give one without =")
        if name in OWN_VARIABLES:
            yield Problem(
                f"env.variables.{name}", "leads each run to its own session, so it is not yours to set; remove it"
            )
    yield from _unknown_placeholders("env.variables", env.variables.values())


def _outside(config: Config) -> Iterator[Problem]:
    engines, port = config.generator.max_engines, config.endpoint.port if config.endpoint is not None else 0
    if port and port + engines - 1 > LAST_PORT:
        yield Problem(
            "agents.port", f"{port} leaves no ports for the {engines} generators, each of which has one; lower it"
        )
    if config.env.workers == "here":
        return
    if config.env.name != AGENT:
        yield Problem(
            "env.workers", f"outside workers would never claim anything, because env.name is {config.env.name!r}; set "
            f"env.name={AGENT}, or env.workers=here"
        )  # fmt: skip
    elif not port:
        yield Problem(
            "agents.port",
            "0 gives each generator a free port, another one after a restart: workers would neither find it nor go on; "
            "give a port",
        )


def _no_words(setting: str, words: Iterable[str]) -> Iterator[Problem]:
    """Words that the operating system takes from nobody."""
    if any(re.search("[\\0\ud800-\udfff]", word) for word in words):
        yield Problem(setting, "holds a zero byte or half a character, which no program can be given; remove it")


def _unknown_placeholders(setting: str, words: Iterable[str]) -> Iterator[Problem]:
    """Other words between braces are arguments as they are; one that looks like a placeholder is a mistake."""
    for name in [name for word in words for name in re.findall(r"\{(\w+)\}", word)]:
        near = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.8)
        if near and name not in PLACEHOLDERS:
            yield Problem(setting, f"{{{name}}} is no placeholder; did you mean {{{near[0]}}}?")


def _not_loaded(score: str, trusted_modules: Iterable[str]) -> str | None:
    module = score.partition(":")[0]
    if not is_module_and_name(score):
        return f"{score!r} is no module:function, so nothing could be imported; a command is a list, such as [{score}]"
    if not any(module == trusted or module.startswith(f"{trusted}.") for trusted in trusted_modules):
        return f"{score!r} is not loaded, for env.trusted_modules does not name {module!r}"
    return None
