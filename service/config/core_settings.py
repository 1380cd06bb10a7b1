"""The settings of the core's parts, each made of a configuration here and nowhere else.

The core (`service.handoff`) knows no configuration: its parts take the frozen values that these functions return.
"""

from __future__ import annotations

from service.config.tree import Config
from service.handoff.batches.advantages import Rule
from service.handoff.batches.batch import BatchSettings
from service.handoff.batches.filters import FilterSettings
from service.handoff.batches.score import ESTIMATORS
from service.handoff.group_bytes import NOTE_BYTES
from service.handoff.steps.limits import Limits, Routing
from service.user_code import registered

ANY_VOCABULARY = 1 << 31
"""In place of a model's vocabulary where the tokens were checked before."""


def estimator_name(config: Config) -> str:
    """The name under which the estimator of `algorithm.estimator` is registered; imports the module, if it names one.

    Raises:
        ConfigError: the module cannot be imported, or nothing is registered under that name.
    """
    setting = config.algorithm.estimator
    registered("algorithm.estimator", "estimator", setting, ESTIMATORS)
    return setting.rpartition(":")[2]


def batch_settings(config: Config) -> BatchSettings:
    """How mini-batches are formed.

    Raises:
        ConfigError: there is no such estimator.
    """
    return BatchSettings(
        ranks=config.trainer.batch_parts,
        token_budget=config.trainer.tokens_of_micro_batch,
        estimator=estimator_name(config),
        returns=config.algorithm.returns,
        credit=config.algorithm.credit,
        gamma=config.algorithm.gamma,
        mode=config.merge_mode,
        train=config.trained_roles,
        named_roles=tuple(config.roles),
        max_staleness=config.buffer.max_staleness,
        layout=config.trainer.layout,
    )


def filter_settings(config: Config) -> FilterSettings:
    """Which complete groups are removed, and what the curriculum counts.

    Raises:
        ConfigError: there is no such estimator.
    """
    algorithm, curriculum = config.algorithm, config.data.curriculum
    return FilterSettings(
        rule=Rule(estimator_name(config), algorithm.returns, algorithm.credit, algorithm.gamma, tuple(config.roles)),
        train=config.trained_roles,
        zero_variance=algorithm.filter_zero_variance,
        over_long=algorithm.filter_over_long,
        success_above=None if curriculum is None else curriculum.success_above,
    )


def message_limits(config: Config, vocab_size: int = ANY_VOCABULARY, routing: Routing | None = None) -> Limits:
    """What a message of steps may contain."""
    return Limits(
        vocab_size=vocab_size,
        max_input_length=config.generator.max_input_length,
        max_generate_length=config.generator.max_generate_length,
        max_turns=config.most_steps,
        n_samples_per_prompt=config.algorithm.n_samples_per_prompt,
        max_attempts=config.buffer.max_attempts,
        max_group_bytes=config.buffer.max_group_bytes,
        n_named_roles=len(config.roles),
        max_note_bytes=max(config.env.max_snapshot_bytes, NOTE_BYTES),
        routing=routing,
    )
