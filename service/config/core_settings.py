"""Makes the settings of the core (`service.handoff`) from a configuration.

The core does not import the configuration. Its parts get the immutable settings that these functions return.
"""

from __future__ import annotations

from service.config.tree import Config
from service.handoff.attempts import AttemptSettings
from service.handoff.batches.batch import BatchSettings
from service.handoff.batches.credit import Rule
from service.handoff.batches.estimators import ESTIMATORS
from service.handoff.batches.filters import FilterSettings
from service.handoff.buffer_settings import BufferSettings
from service.handoff.group_bytes import WorstBytes
from service.handoff.prompt_order import CurriculumSettings
from service.handoff.scoring import ScorerSettings
from service.handoff.steps.values import Limits, Routing
from service.types import max_support
from service.user_code import registered

ANY_VOCABULARY = 1 << 31
"""A vocabulary size with which all token ids pass, for ids that were checked before."""


def advantage_rule(config: Config) -> Rule:
    """The rule by which rewards become advantages. For an estimator `module:name` the module is imported; `ConfigError`
    says what is missing."""
    of = config.algorithm
    registered("algorithm.estimator", "estimator", of.estimator, ESTIMATORS)
    return Rule(of.estimator.rpartition(":")[2], of.returns, of.credit, of.gamma, tuple(config.roles))


def batch_settings(config: Config) -> BatchSettings:
    """The settings with which mini-batches are formed from groups. `ConfigError` if the estimator is unknown."""
    return BatchSettings(
        ranks=config.trainer.batch_parts,
        token_budget=config.trainer.tokens_of_micro_batch,
        rule=advantage_rule(config),
        mode=config.buffer.merge,
        train=config.trained_roles,
        max_staleness=config.buffer.max_staleness,
        layout=config.trainer.layout,
    )


def filter_settings(config: Config) -> FilterSettings:
    """The settings of the filters of complete groups, and the return above which the curriculum counts a success.
    `ConfigError` if the estimator is unknown."""
    algorithm, curriculum = config.algorithm, config.data.curriculum
    return FilterSettings(
        rule=advantage_rule(config),
        train=config.trained_roles,
        zero_variance=algorithm.filter_zero_variance,
        over_long=algorithm.filter_over_long,
        success_above=None if curriculum is None else curriculum.success_above,
    )


def message_limits(config: Config, vocab_size: int = ANY_VOCABULARY, routing: Routing | None = None) -> Limits:
    """The limits that a message of steps must keep, so that the buffer accepts it."""
    return Limits(
        vocab_size=vocab_size,
        max_input_length=config.generator.max_input_length,
        max_generate_length=config.generator.max_generate_length,
        max_turns=config.most_steps,
        n_samples_per_prompt=config.algorithm.n_samples_per_prompt,
        max_attempts=config.buffer.max_attempts,
        max_group_bytes=config.buffer.max_group_bytes,
        n_named_roles=len(config.roles),
        routing=routing,
    )


def buffer_settings(config: Config, vocab_size: int, routing: Routing | None = None) -> BufferSettings:
    """The settings of the buffer. `routing`: shape and type of the recorded routed experts; None if unknown."""
    buffer, curriculum = config.buffer, config.data.curriculum
    return BufferSettings(
        limits=message_limits(config, vocab_size, routing),
        worst=worst_bytes(config, routing.token_bytes if routing else 0),
        batches=batch_settings(config),
        filters=filter_settings(config),
        attempts=AttemptSettings(buffer.max_attempts, buffer.step_deadline, buffer.group_deadline),
        curriculum=None if curriculum is None else CurriculumSettings(curriculum.band, curriculum.outside),
        scorers={
            name: ScorerSettings(scorer.kind, scorer.weight, scorer.combine, scorer.fallback)
            for name, scorer in config.scorers.items()
        },
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        mini_batch_size=config.trainer.mini_batch_size,
        order=buffer.order,
        max_generators=config.generator.max_engines,
        lookahead=buffer.lookahead,
        max_bytes=buffer.max_bytes,
        max_journal_bytes=buffer.max_journal_bytes,
        lease_deadline=buffer.lease_deadline,
        max_lease_attempts=buffer.max_lease_attempts,
        has_checkpoints=config.trainer.checkpoint_every > 0,
    )


def worst_bytes(config: Config, expert_bytes: int = 0) -> WorstBytes:
    """The upper bounds of the bytes of steps, trajectories and groups. `expert_bytes`: bytes of the recorded expert
    numbers of one token, over all layers."""
    agents = config.endpoint
    return WorstBytes(
        n_samples=config.algorithm.n_samples_per_prompt,
        max_group_bytes=config.buffer.max_group_bytes,
        tokens_of_step=config.generator.longest_row,
        max_turns=config.env.max_turns,
        max_session_tokens=0 if agents is None else agents.max_tokens,
        max_session_calls=0 if agents is None else agents.max_calls,
        expert_bytes=expert_bytes,
        max_support=max_support(config.generator),
        has_teacher=config.algorithm.teacher is not None,
        n_scorers=len(config.scorers),
    )
