"""The interface of environments: an environment gets the text of a turn, and returns messages and a reward.

    reset(task, seed) -> first messages     step(text) -> StepResult(messages, reward, done)     close()

An environment never gets token ids. One instance serves one trajectory; after an error or a timeout, only this
trajectory is lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NotRequired, Protocol, TypedDict

from service.errors import in_one_line, last_lines
from service.handoff.steps.values import Role, StopReason

HALF = re.compile("[\ud800-\udfff]")
MAIN = str(Role.MAIN)
"""Name of the role that has the first turn."""
MESSAGE_ROLES = {role: role for role in ("user", "assistant", "system", "tool", "developer")}
MESSAGE_ROLES |= {"human": "user", "prompter": "user", "": "user"}
MESSAGE_ROLES |= dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant")
"""The usual roles of messages, and those of ShareGPT and its like, with what they mean."""


def is_text(value: Any) -> bool:
    """True if a value is a text that can be encoded as UTF-8: one without half of a surrogate pair."""
    return isinstance(value, str) and (str.isascii(value) or not HALF.search(value))


def refuse_other_role(role: Any) -> None:
    """Raises `ValueError` if a message's role is another name for a usual one, which a chat template would drop, or
    show as it is."""
    if isinstance(role, str) and (usual := MESSAGE_ROLES.get(role.strip().lower(), role)) != role:
        raise ValueError(f'write "role": "{usual}" and "content", not the role {role!r}')


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    reasoning_content: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the dataset, as environments get it."""

    uid: str
    prompt: tuple[Message, ...]
    env_class: str
    reward_spec: Mapping[str, Any] = field(default_factory=dict)
    """Data for scoring the answer, such as `{"method": "rule", "ground_truth": "42"}`."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further data for the environment: the column `extra_info`, and all columns that Baton does not know."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the chat template describes to the policy."""
    temperature: float | None = None
    """The sampling temperature of this prompt; None: the configured temperature."""


class StepResult(NamedTuple):
    """The environment's answer to one turn."""

    messages: Sequence[Message]
    """The observation that the policy reads next; ignored if `done` is true."""
    reward: float
    done: bool
    info: Mapping[str, float] = {}
    """Numbers to be measured, such as `{"searches": 1}`; they are summed over the steps of a trajectory."""
    history: Sequence[Message] | None = None
    """A whole conversation that replaces the history; None: `messages` are appended to the history."""
    role: str = MAIN
    """The role that has the next turn: `main`, or a configured role (`roles`). Each role has its own conversation;
    `messages` begin the conversation of this role, or are appended to it."""
    rewards: Mapping[str, float] = {}
    """Rewards for other roles, by name: each is added to the newest turn of its role. (`reward` is for the role whose
    turn was answered.)"""


class OversizedOutput(Exception):
    """Raised if an environment's output is too large; counted separately from other errors."""


class TrajectoryFailed(Exception):
    """Raised if one trajectory has failed; other trajectories continue."""

    def __init__(self, reason: StopReason, detail: str, output: str = "", error: str = "") -> None:
        """`output`: the agent's output; the message shows its last lines. `error`: the agent's exit code, or the name
        of the exception that the environment or the agent raised."""
        super().__init__(f"{reason}: {in_one_line(detail)}{last_lines(output)}")
        self.reason, self.error = reason, error


class Environment(Protocol):
    """One episode of an environment. If its generator is lost, another generator begins the episode again."""

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Begin the episode and return its first messages."""

    async def step(self, text: str) -> StepResult:
        """Return the observation and the reward for one turn of the policy."""

    async def close(self) -> None:
        """Free the episode's resources; called once, even after a failure."""


Status = Literal["ok", "failed", "aborted"]
"""How an agent's run ended. If it is not `ok` and there is no reward, the trajectory is not trained."""


class AgentSession(Protocol):
    """The session in which an agent plays one trajectory over HTTP: the policy's address, a key, and the method
    `finish`."""

    base_url: str
    """The address of the policy, for `OPENAI_BASE_URL`; it ends with `/v1`."""
    key: str
    """The session's key, for `OPENAI_API_KEY`."""
    moves: bool
    """True if another generator is going to continue the session. Then `play` or `resume` is cancelled, and an agent
    with `resume` leaves its work running."""

    async def until_finished(self, silence: float) -> None:
        """Wait until a program elsewhere has finished the session over HTTP (`POST /rl/sessions/ID/finish`).

        Raises:
            TimeoutError: no request came for `silence` seconds.
            CancelledError: another generator continues the session; `moves` is true.
        """

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
        """End the trajectory with its reward. A trajectory that failed and has no reward is retried.

        `reward`: the reward of the role `main`. `rewards`: rewards of single calls (the key is the id of the reply) and
        of configured roles (the key is the role's name). `transcript`: the run's output, kept with the trajectory.
        `reason`: why the run failed. `exit_code`: the exit code of the agent's process; `agents.exit_code_reward` may
        map it to a reward.
        """


class Agent(Protocol):
    """An agent that plays one episode. It calls the policy itself, so it has no `reset` and `step`.

    Some agents only start a program elsewhere, and this program calls the policy. It continues when the generator's
    process ends. Another generator then continues the session: it calls the agent's method `resume` instead of `play`:

        async def resume(self, session, task, seed) -> None
    """

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        """Solve the task by calling the policy at the session's address, and finish the session."""


def tagged(text: str, tag: str) -> list[re.Match[str]]:
    """All matches of `<tag>(.*?)</tag>` in a text, found in time linear in the text's length.

    An ordinary regular expression takes seconds for a response that repeats `<tag>`: it searches from each `<tag>` to
    the end of the text.

    >>> [found[1] for found in tagged("<a> 1 </a> <a><a> 2 </a> <a>", "a")]
    [' 1 ', '<a> 2 ']
    """
    closing = f"</{tag}>"
    after_last = text.rfind(closing) + len(closing)
    return [*re.compile(f"<{tag}>(.*?){closing}", re.DOTALL).finditer(text, 0, after_last)]
