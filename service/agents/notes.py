"""What a step's note says about its call, by which the next process of a generator goes on with the session.

Tokens come from the steps themselves. The reply is read from them again where a client asks for it once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from service.handoff.prefixes.prefix_index import PrefixIndex
from service.handoff.steps.tables import step_objects
from service.types import Int32s, Step, Steps

How = Literal["root", "appended", "rerendered"]
"""A new conversation, a continuation of sampled tokens, or one with answers of which no call has the tokens."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A call beside its tokens."""

    name: str
    """The id that clients may send back."""
    parent: int
    """Index of the call that it continues; -1 for none."""
    how: How
    body: str
    """What identifies the client's request."""
    after: str
    """Digest, in hex, of the conversation that ends with the reply; empty where the client brought tokens."""
    system: str | None = None
    """Digest, in hex, of the system messages with which a root begins; None of other calls."""
    has_tools: bool = False
    """Of a root: whether the client offered tools."""
    named: str | None = None
    """What the client says that the conversation is for."""


class Noted(NamedTuple):
    """A step with the note that was read from it."""

    step: Step
    note: Note
    token_ids: Int32s
    """[P + T] the whole prompt and the response."""


def written(note: Note) -> str:
    """The note as a step carries it."""
    return msgspec.json.encode(note).decode()


def noted_steps(steps: Steps) -> Iterator[Noted]:
    """The steps of one trajectory with their notes, by index.

    Raises:
        ValueError: a step is missing, extends unknown tokens, or has no note.
    """
    index, order = PrefixIndex(), np.argsort(steps.index_K, kind="stable").tolist()
    objects = step_objects(steps)
    for place, k in enumerate(order):
        step = objects[k]
        if step.index != place:
            raise ValueError(f"step {place} is missing")
        try:
            note = msgspec.json.decode(step.note, type=Note)
        except msgspec.MsgspecError as error:
            raise ValueError(f"step {place} has no note of a call: {error}") from error
        if not -1 <= note.parent < place:
            raise ValueError(f"step {place} continues step {note.parent}")
        yield Noted(step, note, index.add(steps, k).tip.tokens())
