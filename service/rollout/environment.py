"""What an environment is: text in, messages and reward out.

    reset(task, seed) -> first messages     step(text) -> StepResult(messages, reward, done)     close()

An environment never sees token ids. One instance serves one trajectory. Whatever it raises, and however long it
takes, costs that trajectory only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypedDict


def is_text(value: Any) -> bool:
    """A text that can be written as UTF-8, which half of a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the dataset, as environments see it."""

    uid: str
    prompt: tuple[Message, ...]
    env_class: str
    reward_spec: Mapping[str, Any] = field(default_factory=dict)
    """How the answer is judged, such as `{"method": "rule", "ground_truth": "42"}`."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the environment needs; every further column of the row is here too."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the chat template tells the policy about."""
    temperature: float | None = None
    """The prompt's own sampling temperature; None: the configured one."""


class StepResult(NamedTuple):
    """The environment's answer to one turn."""

    messages: Sequence[Message]
    """What the policy reads next; ignored when `done`."""
    reward: float
    done: bool
    info: Mapping[str, float] = {}
    """Facts to be measured per trajectory, such as `{"searches": 1}`; they are summed over its steps."""
    history: Sequence[Message] | None = None
    """The whole conversation as the policy reads it from now on, where the environment rewrites it; None: it grows."""


class OversizedOutput(Exception):
    """The environment said more than may be read; counted as such instead of as an error."""


class Environment(Protocol):
    """One episode."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin the episode and return the prompt."""

    async def step(self, text: str) -> StepResult:
        """Answer one turn of the policy."""

    async def close(self) -> None:
        """Free what the episode holds; called once, also after a failure."""
