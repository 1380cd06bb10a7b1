"""Handover of a trajectory: another generator continues it after its last accepted step, with the help of the step's
note.

the note contains                       the other generator
a snapshot, the messages after the step calls reset and restore(snapshot), and plays the next turn
no snapshot                             calls reset, and plays each step's sampled text again; prompts and rewards must
                                        be equal
that the episode is done                only sends the trajectory's end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from service.handoff.prefixes.prefix_index import PrefixError, PrefixIndex
from service.handoff.steps.stop_reason import StopReason
from service.handoff.steps.tables import step_objects
from service.rollout.env_guard import EnvGuard
from service.rollout.environment import Message, StepResult, TrajectoryFailed
from service.types import Int32s, Step, Steps


class Note(msgspec.Struct, frozen=True, array_like=True):
    """The data that lets another generator continue a trajectory after a step. The data is stored with the step."""

    done: bool
    snapshot: bytes | None = None
    """The environment's state after the step; None: the episode is replayed instead."""
    messages: Sequence[Any] = ()
    """The environment's messages after the step, with all their fields."""
    is_history: bool = False
    """True if `messages` are the whole conversation, False if they are only the answer to the step."""
    info: dict[str, float] = {}
    """The environment's `info`, each number summed over all steps so far."""


class EarlierStep(NamedTuple):
    """A step that another generator played, and that the buffer accepted, before this generator continued the
    trajectory."""

    token_ids: Int32s
    """[P + T] the tokens of the whole prompt and of the response."""
    step: Step
    reward: float


async def write_note(
    environment: EnvGuard, result: StepResult, history: Sequence[Message] | None, info: Counter[str], most: int
) -> str:
    """The note of the step that the environment has just answered. Empty if no generator can continue after the step,
    or if the note would be too large.

    `history`: the whole conversation, if the next prompt needs all of it; `most`: maximum bytes of a note.

    Raises:
        TrajectoryFailed: the environment's `snapshot` raised an error, missed its deadline, or returned no bytes.
    """
    if result.done:
        note = Note(True, info=dict(info))
    elif isinstance(snapshot := await environment.snapshot(), bytes):
        messages = result.messages if history is None else history
        note = Note(False, snapshot, messages, history is not None, dict(info))
    elif snapshot:
        note = Note(False)
    else:
        return ""
    text = msgspec.json.encode(note).decode()
    return text if len(text.encode()) <= most else ""


def read_note(steps: Steps) -> tuple[Note, list[EarlierStep]]:
    """The note of a trajectory's last step, and all its steps in order of their index.

    Raises:
        TrajectoryFailed: the last step has no note, or steps are missing.
    """
    index, earlier = PrefixIndex(), list[EarlierStep]()
    order = np.argsort(steps.index_K, kind="stable").tolist()
    objects = step_objects(steps)
    for k in order:
        try:
            tokens = index.add(steps, k).tip.tokens()
        except PrefixError as error:
            raise not_restored(str(error)) from error
        earlier.append(EarlierStep(tokens, objects[k], float(steps.reward_K[k])))
    try:
        note = msgspec.json.decode(objects[order[-1]].note, type=Note)
    except msgspec.MsgspecError as error:
        raise not_restored(f"its last step has no note to continue by: {error}") from error
    return note, earlier


def not_restored(detail: str) -> TrajectoryFailed:
    """The error for a trajectory that cannot be continued and has to restart."""
    return TrajectoryFailed(StopReason.ENVIRONMENT_NOT_RESTORED, detail)
