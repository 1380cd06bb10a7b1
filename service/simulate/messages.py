"""The steps that simulated generators send: real columns, made quickly."""

from __future__ import annotations

import numpy as np
import xxhash

from service.columns import token_bytes
from service.handoff.steps.builder import StepSink
from service.types import Extension, Float32s, Int32s, Int64s, TrajectoryId

VOCABULARY = 1 << 16


class SimulatedTrajectory:
    """One trajectory, of which each step extends the whole step before by one token of observation."""

    def __init__(self, of: TrajectoryId, uid: str) -> None:
        self.of, self.uid = of, uid
        self.n_steps = 0
        self._length = 0
        self._digest = xxhash.xxh3_64()

    def append_step(self, sink: StepSink, versions_T: Int64s, reward: float) -> None:
        """Append the next step, with these versions of its sampled tokens."""
        count = len(versions_T)
        first = 31 * self.of.group_id + 7 * self.of.sample
        ids: Int32s = (np.arange(count + 1, dtype=np.int32) + first) % VOCABULARY
        logprobs_T: Float32s = np.full(count, -0.5, np.float32)
        extends = Extension(self.n_steps - 1, self._length, self._digest.intdigest()) if self.n_steps else None
        sink.append(
            self.of,
            self.uid,
            self.n_steps,
            ids[:1],
            ids[1:],
            reward=reward,
            extends=extends,
            logprobs=logprobs_T,
            loss_mask=np.ones(count, np.bool_),
            versions=versions_T,
        )
        self.n_steps += 1
        self._length += count + 1
        self._digest.update(token_bytes(ids))
