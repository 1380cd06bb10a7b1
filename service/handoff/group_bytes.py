"""Maximum bytes of a group's steps: one formula for all code that reserves memory or refuses a message.

The maximum covers the accepted steps in memory and their journal frames, so an admitted group always has room:

    2 samples of 2 turns of at most 100 tokens, 17 bytes a token:
    each trajectory   2 steps and 1 end record   2 * 100 * 17 + 3 * ITEM_BYTES
    the group         2 trajectories             twice as much

Every step and every end record is counted as if it came in a message of its own, and as if no prefix were shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.columns import columns_of
from service.types import Steps

NAME_BYTES = 5 << 10
"""Maximum UTF-8 bytes of a generator's name, a prompt's uid, a stop reason and a note or an info together."""
NOTE_BYTES = 1 << 10
"""The part of NAME_BYTES that is for a note, and the maximum bytes of a note."""
ITEM_BYTES = (3 << 10) + NAME_BYTES
"""Maximum bytes of a step or an end record without tokens: other columns, frame, header and names of a message."""
TOKEN_BYTES = sum(column.dtype.itemsize for column in columns_of(Steps).tokens if not column.optional)
"""Bytes of a token in the columns that every generator sends: id, log-probability, mask, version."""
TEACHER_BYTES = 4
"""Bytes of a token's log-probability under the teacher."""
SUPPORT_BYTES = 4
"""Bytes of one token of a support. The drawn token is counted, too, but not stored: its bytes cover the size."""
REWARD_BYTES = 9
"""Bytes of one reward in a scorer's answer."""
SCORE_BYTES = 1 << 9
"""Bytes of a scorer's answer without its rewards, texts and log-probabilities: its journal frame."""
INFO_BYTES = 1 << 11
"""Maximum UTF-8 bytes of a scorer's text about one trajectory."""
SAID_BYTES = 9
"""Maximum bytes of an end record's values about one step: a role and a reward."""
TRANSCRIPT_BYTES = 1 << 16
"""Maximum UTF-8 bytes of the transcript that an end record carries."""
EVENT_BYTES = 1 << 20
"""Bytes of the journal that are kept for events, so that leases continue when no more groups are admitted."""
JOURNAL_SEGMENTS = 8
"""Number of segments of a full journal; to free the oldest segment, its needed frames are copied to the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstBytes:
    """Maximum bytes of the steps, trajectories and groups of a run."""

    n_samples: int
    max_group_bytes: int
    tokens_of_step: int
    """Tokens of the longest prompt and the longest response together."""
    max_turns: int
    """Maximum turns of a trajectory in an environment."""
    max_session_tokens: int = 0
    """Maximum tokens of all calls of an agent together."""
    max_session_calls: int = 0
    """Maximum calls of an agent; 0: there are no agents."""
    expert_bytes: int = 0
    """Bytes of a token's routed experts, over all layers."""
    max_support: int = 0
    """Maximum size of a token's support; 0: the sampler leaves out no token."""
    has_teacher: bool = False
    n_scorers: int = 0

    @property
    def token(self) -> int:
        """Bytes of one token, summed over all columns."""
        support = SUPPORT_BYTES * self.max_support
        return TOKEN_BYTES + self.expert_bytes + support + TEACHER_BYTES * self.has_teacher

    @property
    def step(self) -> int:
        """Bytes of one step with the longest prompt and the longest response."""
        return self.tokens_of_step * self.token + ITEM_BYTES

    @property
    def scores(self) -> int:
        """Maximum bytes of all scorers' answers about one trajectory, without a teacher's log-probabilities."""
        return self.n_scorers * (SCORE_BYTES + REWARD_BYTES + INFO_BYTES)

    @property
    def trajectory(self) -> int:
        """Maximum bytes of one trajectory: turns of the maximum length, or an agent's session with its transcript, but
        at most an equal share of `buffer.max_group_bytes`."""
        everything = self.max_turns * (self.step + SAID_BYTES) + ITEM_BYTES
        if calls := self.max_session_calls:
            session = self.max_session_tokens * self.token + (calls + 1) * ITEM_BYTES
            everything = max(everything, session + SAID_BYTES * calls + TRANSCRIPT_BYTES)
        return min(everything + self.scores, self.max_group_bytes // self.n_samples)

    @property
    def group(self) -> int:
        """Maximum bytes of one group."""
        return self.n_samples * self.trajectory

    def journal(self, n_groups: int) -> int:
        """Smallest journal that cannot deadlock while `n_groups` groups are needed: those of all optimizer steps since
        the oldest kept checkpoint, or of one mini-batch.

        Frames that are not removed yet count as one more group; events and copies of needed frames take room too.
        """
        groups = (n_groups + 1) * self.group
        return (groups + EVENT_BYTES) * JOURNAL_SEGMENTS // (JOURNAL_SEGMENTS - 1) + 1
