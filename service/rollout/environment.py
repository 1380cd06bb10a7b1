"""The protocol of environments: an environment gets text, and returns messages and a reward.

    reset(task, seed) -> first messages     step(text) -> StepResult(messages, reward, done)     close()

An environment gets text, never token ids. One instance serves one trajectory. An error or a timeout loses only that
trajectory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from service.errors import in_one_line, last_lines
from service.handoff.steps.roles import Role
from service.handoff.steps.stop_reason import StopReason

MAIN = str(Role.MAIN)
"""The role that has the first turn."""


def is_text(value: Any) -> bool:
    """Whether a value is a text that can be encoded as UTF-8; a text with half of a surrogate pair cannot."""
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
    """One row of the dataset."""

    uid: str
    prompt: tuple[Message, ...]
    env_class: str
    reward_spec: Mapping[str, Any] = field(default_factory=dict)
    """How the answer is scored, such as `{"method": "rule", "ground_truth": "42"}`."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further data for the environment; all other columns of the row are included."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools, which the chat template describes to the policy."""
    temperature: float | None = None
    """The prompt's own sampling temperature; None: the configured one."""


class StepResult(NamedTuple):
    """The environment's answer to one turn."""

    messages: Sequence[Message]
    """The observation, which the policy reads next; ignored when `done`."""
    reward: float
    done: bool
    info: Mapping[str, float] = {}
    """Numbers to be measured per trajectory, such as `{"searches": 1}`; they are summed over its steps."""
    history: Sequence[Message] | None = None
    """The whole conversation that replaces the history; None: `messages` are appended to the history."""
    role: str = MAIN
    """The role that has the next turn: `main`, or a configured role (`roles`). Each role has a conversation of its own;
    `messages` are appended to the conversation of this role, or begin it."""
    rewards: Mapping[str, float] = {}
    """Rewards for other roles, by name; each is added to the role's newest turn. (`reward` is for the role whose turn
    this was.)"""


class OversizedOutput(Exception):
    """The environment's output is too large; counted separately from other errors."""


class TrajectoryFailed(Exception):
    """Raised if one trajectory has failed; other trajectories continue."""

    def __init__(self, reason: StopReason, detail: str, output: str = "", error: str = "") -> None:
        """`output`: the agent's output, of which the message shows the last lines; `error`: the agent's
        exit code, or the name of the exception that the environment or agent raised."""
        super().__init__(f"{reason}: {in_one_line(detail)}{last_lines(output)}")
        self.reason, self.error = reason, error


class Environment(Protocol):
    """One episode of an environment.

    If its generator is lost, an episode continues in another generator if the environment has the two methods, or the
    attribute, below; otherwise the episode restarts:

        async def snapshot(self) -> bytes           the state after a step
        async def restore(self, snapshot) -> None   restores that state in a new instance, after its `reset`

        replayable = True                           the same texts after the same `reset` always get the same answers
    """

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin the episode and return the prompt."""

    async def step(self, text: str) -> StepResult:
        """Return the observation and the reward for one turn of the policy."""

    async def close(self) -> None:
        """Free the episode's resources; called once, also after a failure."""


async def snapshot_of(environment: Any) -> Any:
    """An environment's snapshot; True if the episode can be replayed instead, False if neither is possible."""
    if hasattr(environment, "snapshot"):
        return await environment.snapshot()
    return getattr(environment, "replayable", False) is True


Status = Literal["ok", "failed", "aborted"]
"""How an agent's run ended; a run that is not `ok` and has no reward is not trained."""


class AgentSession(Protocol):
    """One trajectory of an agent that calls the policy over HTTP: the address and the key."""

    base_url: str
    """The value for `OPENAI_BASE_URL`; it ends with `/v1`."""
    key: str
    """The value for `OPENAI_API_KEY`."""

    def finish(
        self,
        reward: float | None,
        status: Status = "ok",
        info: Mapping[str, float] = {},
        transcript: str = "",
        rewards: Mapping[str, float] = {},
        reason: str = "",
        exit_code: int | None = None,
    ) -> None:
        """End the trajectory with its reward; a trajectory that failed without a reward is retried.

        `reward`: the reward of the role `main`. `rewards`: rewards of single calls, by the id of the reply, and of
        configured roles, by name. `transcript`: the run's output, kept for `baton trajectories show`. `reason`: why the
        run failed. `exit_code`: that of the agent's process; `agents.exit_code_reward` may map it to a reward.
        """


class Agent(Protocol):
    """One episode of an agent, which calls the policy itself and so has no `reset` and `step`."""

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Solve the task by calls to the session's address, and finish the session."""


def tagged(text: str, tag: str) -> list[re.Match[str]]:
    """The matches of `<tag>(.*?)</tag>`, in time that is linear in the text's length.

    The plain search takes seconds for a response that repeats `<tag>`: it searches from each `<tag>` to the end.

    >>> [found[1] for found in tagged("<a> 1 </a> <a><a> 2 </a> <a>", "a")]
    [' 1 ', '<a> 2 ']
    """
    closing = f"</{tag}>"
    after_last = text.rfind(closing) + len(closing)
    return [*re.compile(f"<{tag}>(.*?){closing}", re.DOTALL).finditer(text, 0, after_last)]
