"""Small made episodes for the tests of the handoff core."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from service.columns import digest
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.steps.tables import ends_table, steps_table
from service.handoff.steps.values import Limits
from service.types import Extension, Int32s, Sender, Step, TrajectoryEnd, TrajectoryId

SENDER = Sender("generator-0", 1, 0)

FIRST = TrajectoryId(0, 0)

LIMITS = Limits(
    vocab_size=1000,
    max_input_length=512,
    max_generate_length=64,
    max_turns=60,
    n_samples_per_prompt=8,
    max_attempts=3,
    max_group_bytes=1 << 20,
)


def ids(*values: int) -> Int32s:
    return np.array(values, np.int32)


def step(
    index: int,
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    trajectory: TrajectoryId = FIRST,
    uid: str = "a",
    reward: float = 0.0,
    version: int = 0,
) -> Step:
    """A step in the full form; its log-probabilities tell its tokens apart."""
    count = len(response)
    return Step(
        trajectory=trajectory,
        prompt_uid=uid,
        index=index,
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logprobs=-np.arange(1, count + 1, dtype=np.float32) / 8 - index,
        loss_mask=np.ones(count, np.bool_),
        versions=np.full(count, version, np.int64),
        reward=reward,
    )


def end(trajectory: TrajectoryId = FIRST, steps: int = 1, reward: float = 0.0, uid: str = "a") -> TrajectoryEnd:
    return TrajectoryEnd(trajectory, uid, steps, "stop", reward)


def episode(
    rng: np.random.Generator,
    turns: int,
    trajectory: TrajectoryId = FIRST,
    uid: str = "a",
    reward: float = 0.0,
) -> list[Step]:
    """Steps in the full form, each continuing the one before; the last has the reward."""
    history, steps = rng.integers(0, 1000, rng.integers(1, 9)).tolist(), []
    for index in range(turns):
        response = rng.integers(0, 1000, rng.integers(1, 6)).tolist()
        steps.append(step(index, history, response, trajectory=trajectory, uid=uid, version=index))
        history = history + response + rng.integers(0, 1000, rng.integers(0, 5)).tolist()
    return [*steps[:-1], replace(steps[-1], reward=reward)] if steps else []


def shared(steps: Sequence[Step]) -> list[Step]:
    """The same steps of one trajectory, each carrying only what the one before lacks."""
    extended = list(steps[:1])
    for before, now in pairwise(steps):
        whole = np.concatenate((before.prompt_ids, before.response_ids))
        extension = Extension(before.index, len(whole), digest(whole))
        extended.append(replace(now, prompt_ids=now.prompt_ids[len(whole) :], extends=extension))
    return extended


def whole_prompts(steps: Iterable[Step]) -> list[Step]:
    """The steps of one trajectory by index, each with its whole prompt: the inverse of `shared`."""
    wholes, made = dict[int, Int32s](), list[Step]()
    for now in sorted(steps, key=lambda step: step.index):
        if now.extends is not None:
            before = wholes[now.extends.step][: now.extends.length]
            now = replace(now, prompt_ids=np.concatenate((before, now.prompt_ids)), extends=None)
        wholes[now.index] = np.concatenate((now.prompt_ids, now.response_ids))
        made.append(now)
    return made


def complete_group(
    steps: Sequence[Step], ends: Sequence[TrajectoryEnd], rng: np.random.Generator | None = None
) -> CompleteGroup:
    """A group of these trajectories; with `rng` its steps come in any order."""
    order = range(len(steps)) if rng is None else rng.permutation(len(steps))
    of, uid = ends[0].trajectory, ends[0].prompt_uid
    return CompleteGroup(of.group_id, uid, steps_table([steps[k] for k in order]), ends_table(ends))
