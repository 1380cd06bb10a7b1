"""The rows that keep observations inside responses, which the figure of padded lengths compares with."""

from __future__ import annotations

import asyncio
from typing import cast

import numpy as np

from benchmarks.padded_lengths import World, with_observations
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.steps.tables import ends_table, step_objects, steps_table
from service.types import Int32s, Step, TrajectoryId
from tests.pure.handoff.worlds import end, episode, ids, shared


class Telling:
    """An environment that says three tokens more after the last turn."""

    async def observation(self, step: Step) -> Int32s:
        return ids(1, 2, 3)


def test_an_observation_stands_behind_the_response_that_asked_for_it_also_after_the_last_turn() -> None:
    rng = np.random.default_rng(0)
    whole = {sample: episode(rng, 3, TrajectoryId(0, sample)) for sample in (0, 1)}
    ends = [end(TrajectoryId(0, 0), 3), end(TrajectoryId(0, 1), 3)._replace(stop_reason="length")]
    steps = steps_table([step for of in whole.values() for step in shared(of)])
    group = CompleteGroup(0, "a", steps, ends_table(ends))
    told = step_objects(asyncio.run(with_observations(cast(World, Telling()), group)).steps)
    for sample, last in ((0, ids()), (1, ids(1, 2, 3))):
        before = whole[sample]
        following = [*(step.prompt_ids for step in before[1:]), None]
        for mine, was, after in zip(told[3 * sample : 3 * sample + 3], before, following, strict=True):
            read_and_said = np.concatenate([was.prompt_ids, was.response_ids])
            row = np.concatenate([mine.prompt_ids, mine.response_ids])
            assert row.tolist() == (np.concatenate([read_and_said, last]) if after is None else after).tolist()
            n = len(was.response_ids)
            assert mine.response_ids[:n].tolist() == was.response_ids.tolist()
            assert mine.loss_mask.tolist() == [True] * n + [False] * (len(mine.response_ids) - n)
