"""How many bytes a group's steps may take: one formula for every place that reserves or refuses.

The configuration check, admission, the store and the journal's bound all count in these bytes. They cover both the
memory of the accepted steps and their frames in the journal, so a group that was admitted always has its place:

    2 samples of 2 turns of at most 100 tokens, 21 bytes a token:
    each trajectory   2 steps and 1 end   2 * 100 * 21 + 3 * ITEM_BYTES
    the group         2 trajectories      as much twice

Every step and end is counted as if it came in a message of its own, and as if no prefix were shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.columns import columns_of
from service.types import Steps

if TYPE_CHECKING:  # the configuration's checks import this module
    from service.config.tree import Config

NAME_BYTES = 5 << 10
"""UTF-8 bytes of a generator's name, a prompt's uid, a stop reason and a note together, at most."""
NOTE_BYTES = 1 << 10
"""Those of a note; what a longer one has beyond counts by itself."""
ITEM_BYTES = (3 << 10) + NAME_BYTES
"""A step or an end beside its tokens: its other columns, and what a message of its own adds (frame, header, names)."""
TOKEN_BYTES = sum(
    column.dtype.itemsize
    for column in columns_of(Steps).tokens
    if column.about.ndim == 1 and column.name != "teacher_logprobs_N"
)
"""A token in all columns of a generator but the routed experts: id, log-probability, mask, version, reward."""
TEACHER_BYTES = 4
"""The log-probability of a token under the teacher."""
SCORE_BYTES = 1 << 9
"""A scorer's answer beside its rewards, what it says about trajectories, and log-probabilities: the journal's frame."""
INFO_BYTES = 1 << 11
"""UTF-8 bytes of what a scorer says about one trajectory, at most."""
EXPERT_BYTES = 2
"""One routed expert of one token."""
SAID_BYTES = 9
"""What an end says about a step at most: a role and a reward."""
TRANSCRIPT_BYTES = 1 << 16
"""UTF-8 bytes of the transcript that an end carries, at most."""
EVENT_BYTES = 1 << 20
"""Room in the journal for events, so that leases go on when no more groups are admitted."""
JOURNAL_SEGMENTS = 8
"""Segments of a full journal; what is still needed of the oldest one is copied to the end when the room is needed."""


def item_bytes(n_tokens: int, token_bytes: int, n_items: int) -> int:
    """Bytes of so many tokens in so many steps and ends."""
    return n_tokens * token_bytes + n_items * ITEM_BYTES


def score_bytes(n_rewards: int, teacher_bytes: int) -> int:
    """Bytes of a scorer's answer, without what it says about trajectories."""
    return SCORE_BYTES + 9 * n_rewards + teacher_bytes


def scores_bytes(config: Config) -> int:
    """Bytes of the answers of all scorers about one trajectory at worst, without a teacher's log-probabilities."""
    return len(config.scorers) * (score_bytes(1, 0) + INFO_BYTES)


def worst_step_bytes(config: Config, experts_per_token: int = 0) -> int:
    """Bytes of one step at worst: the longest prompt and the longest response.

    `experts_per_token`: routed experts that the model records for each token, over all layers.
    """
    longest = config.generator.max_input_length + config.generator.max_generate_length
    long_note = max(config.env.max_snapshot_bytes - NOTE_BYTES, 0)
    return item_bytes(longest, _token_bytes(config, experts_per_token), 1) + long_note


def _token_bytes(config: Config, experts_per_token: int) -> int:
    return TOKEN_BYTES + EXPERT_BYTES * experts_per_token + (TEACHER_BYTES if config.algorithm.teacher else 0)


def worst_trajectory_bytes(config: Config, experts_per_token: int = 0) -> int:
    """Bytes of one trajectory at worst, or its part of `buffer.max_group_bytes`.

    In an environment every turn has full length; an agent's calls have `agents.max_tokens` tokens together, and its end
    has a transcript. An end has a role and a reward of each step.
    """
    of_step = worst_step_bytes(config, experts_per_token) + SAID_BYTES
    everything = config.env.max_turns * of_step + ITEM_BYTES
    if (agents := config.endpoint) is not None:
        session = item_bytes(agents.max_tokens, _token_bytes(config, experts_per_token), agents.max_calls + 1)
        everything = max(everything, session + SAID_BYTES * agents.max_calls + TRANSCRIPT_BYTES)
    everything += scores_bytes(config)
    return min(everything, config.buffer.max_group_bytes // config.algorithm.n_samples_per_prompt)


def worst_group_bytes(config: Config, experts_per_token: int = 0) -> int:
    """Bytes of one group at worst."""
    return config.algorithm.n_samples_per_prompt * worst_trajectory_bytes(config, experts_per_token)


def worst_journal_bytes(config: Config, experts_per_token: int = 0) -> int:
    """Bytes of the smallest journal that never fills up for good.

    The journal keeps the groups of all optimizer steps since the oldest checkpoint that is kept, or of one mini-batch
    where no checkpoints are written; beside them events, and a segment's room for copies of what is needed. Groups that
    ended otherwise and replaced attempts are removed whenever a claim waits for their place; what may be left of them
    counts as one more group.
    """
    steps = max(config.trainer.checkpoint_every * config.trainer.keep_checkpoints, 1)
    n_groups = steps * config.trainer.mini_batch_size + 1
    groups = n_groups * worst_group_bytes(config, experts_per_token)
    return (groups + EVENT_BYTES) * JOURNAL_SEGMENTS // (JOURNAL_SEGMENTS - 1) + 1
