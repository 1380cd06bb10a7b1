"""Refuses combinations of settings that would deadlock, lose data or be wrong, and names the consequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from service.config import checks_learn, checks_rollout
from service.config.problem import Problem, Rule
from service.config.source import Source
from service.config.tree import Config
from service.errors import ConfigError
from service.handoff.group_bytes import ITEM_BYTES, worst_group_bytes, worst_journal_bytes, worst_step_bytes


def check(config: Config, source: Source | None = None) -> None:
    """Refuse combinations of settings that cannot work.

    Raises:
        ConfigError: names every refused combination, a line each, with the place in `source` that set it.
    """
    _refuse(problems(config), source)


def problems(config: Config) -> list[Problem]:
    """Every refused combination, in the order of the tree."""
    return [problem for rule in RULES for problem in rule(config)]


def check_bytes(config: Config, experts_per_token: int) -> None:
    """Refuse bounds of memory and journal that are too small for a model that records routed experts.

    Raises:
        ConfigError: names every bound that is too small.
    """
    _refuse(_bytes(config, experts_per_token))


def _refuse(problems: Iterable[Problem], source: Source | None = None) -> None:
    lines = []
    for problem in problems:
        place = source.place(tuple(problem.path.split("."))) if source else None
        lines.append(f"{place + '  ' if place else ''}{problem.path}: {problem.message}")
    if lines:
        raise ConfigError("\n".join(lines))


def _staleness(config: Config) -> Iterator[Problem]:
    buffer, sync_every = config.buffer, config.weights.sync_every
    if buffer.lookahead == "auto":
        return
    if buffer.max_staleness < buffer.lookahead:
        yield Problem(
            "buffer.max_staleness",
            f"{buffer.max_staleness} is below buffer.lookahead ({buffer.lookahead}): tokens that were admitted on "
            "purpose would be masked at training, so their generation is wasted; raise it, or lower lookahead",
        )
    if buffer.lookahead < sync_every - 1:
        yield Problem(
            "buffer.lookahead",
            f"{buffer.lookahead} is below weights.sync_every - 1 ({sync_every - 1}): the generators would wait for "
            "weights that come only after mini-batches which they may not begin, a deadlock; "
            f"use at least {sync_every - 1}",
        )


def _bytes(config: Config, experts_per_token: int = 0) -> Iterator[Problem]:
    """Bounds of memory and journal; `experts_per_token` is known once the model has been read."""
    buffer, samples, size = config.buffer, config.algorithm.n_samples_per_prompt, config.trainer.mini_batch_size
    one_turn = samples * (worst_step_bytes(config, experts_per_token) + ITEM_BYTES)
    if buffer.max_group_bytes < one_turn:
        yield Problem(
            "buffer.max_group_bytes",
            f"{buffer.max_group_bytes} cannot hold one turn of each of the {samples} samples of a group at worst "
            f"({one_turn} bytes): long groups would all be refused, so the policy would learn to be short; raise it",
        )
    mini_batch = size * worst_group_bytes(config, experts_per_token)
    if buffer.max_bytes < mini_batch:
        yield Problem(
            "buffer.max_bytes",
            f"{buffer.max_bytes} cannot hold the {size} groups of a mini-batch at worst ({mini_batch} bytes): "
            "admission would stop before a mini-batch is complete, a deadlock",
        )
    every, kept = config.trainer.checkpoint_every, config.trainer.keep_checkpoints
    journal = worst_journal_bytes(config, experts_per_token)
    if buffer.max_journal_bytes < journal:
        held = f"the {every * kept} mini-batches since the oldest checkpoint that is kept" if every else "a mini-batch"
        yield Problem(
            "buffer.max_journal_bytes",
            f"{buffer.max_journal_bytes} cannot hold {held} at worst ({journal} bytes): the journal would fill before "
            "it may forget, and the run would stop; raise it"
            + (", write checkpoints more often, or keep fewer" if every else ""),
        )


def _merge(config: Config) -> Iterator[Problem]:
    step_wise, merge = config.algorithm.step_wise, config.buffer.merge
    if merge != "off" and not step_wise:
        yield Problem(
            "buffer.merge",
            f"{merge} needs algorithm.step_wise=true: without it a trajectory is one sequence already and there are "
            "no steps to merge; use buffer.merge=off",
        )
    if not step_wise and config.generator.conversation == "rerender":
        yield Problem(
            "generator.conversation",
            "rerender lets the chat template rewrite earlier turns, so a trajectory is no single sequence; use append "
            "or inline, or algorithm.step_wise=true",
        )


RULES: tuple[Rule, ...] = (*checks_rollout.RULES, _staleness, _bytes, _merge, *checks_learn.RULES)
