"""What simulated generators send: real step groups, made quickly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from service.handoff.prefixes.tree import token_bytes
from service.handoff.steps.tables import concat_steps, ends_table
from service.handoff.steps.wire import encode
from service.types import NO_VERSION, Int32s, Int64s, Sender, StepGroup, Steps, TrajectoryEnd, TrajectoryId

VOCABULARY = 1 << 16


class Tokens:
    """A trajectory's tokens so far: each step extends all of the one before by one token of observation."""

    def __init__(self, of: TrajectoryId, uid: str) -> None:
        self.of, self.uid = of, uid
        self.steps = 0
        self._length = 0
        self._digest = xxhash.xxh3_64()

    def step(self, versions_T: Int64s, reward: float) -> Steps:
        """The next step, with these versions of its sampled tokens."""
        count = len(versions_T) + 1
        ids: Int32s = (np.arange(count, dtype=np.int32) + 31 * self.of.group_id + 7 * self.of.sample) % VOCABULARY
        steps = Steps(
            uids=(self.uid,),
            stop_reasons=("stop",),
            group_id_K=np.array([self.of.group_id], np.int64),
            sample_K=np.array([self.of.sample], np.int32),
            attempt_K=np.array([self.of.attempt], np.int32),
            index_K=np.array([self.steps], np.int32),
            uid_K=np.zeros(1, np.int32),
            stop_reason_K=np.zeros(1, np.int32),
            temperature_K=np.ones(1, np.float32),
            reward_K=np.array([reward], np.float64),
            has_logprobs_K=np.ones(1, np.bool_),
            prompt_length_K=np.ones(1, np.int32),
            extends_K=np.array([self.steps - 1], np.int32),
            extends_length_K=np.array([self._length], np.int32),
            extends_digest_K=np.array([self._digest.intdigest() if self.steps else 0], np.uint64),
            offsets_K=np.array([0, count], np.int64),
            token_ids_N=ids,
            logprobs_N=np.full(count, -0.5, np.float32),
            loss_mask_N=np.arange(count) > 0,
            versions_N=np.concatenate((np.array([NO_VERSION], np.int64), versions_T)),
        )
        self.steps += 1
        self._length += count
        self._digest.update(token_bytes(ids))
        return steps


def message(sender: Sender, steps: Sequence[Steps], ends: Sequence[TrajectoryEnd]) -> bytes:
    """Steps and ends on the wire."""
    return encode(StepGroup(sender, concat_steps(steps), ends_table(ends)))
