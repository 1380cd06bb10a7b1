"""The interface for users. Names that are not here and not in `baton.library` may change without notice.

run, Config, load_config, BatonError             training: `run("mine.yaml")` does what `baton run` does
Environment, Task, Message, StepResult           an environment (docs/environments.md)
OversizedOutput, UserError                       errors for an answer that is too long, and for wrong settings
load_tasks                                       the tasks of a dataset, for the tests of an environment
is_text, tagged, tool_calls, tool_answer         functions that read what a policy wrote
ChildProcesses, ChildDied, serve_child           processes for code of an environment
Agent, AgentSession                              an agent that calls the policy over HTTP (docs/agents.md)
Trajectory, Turn                                 the input of a scorer that gives rewards (docs/scorers.md)
estimator, policy_loss, LossInputs, LossTerms    advantages and losses (docs/learning.md)

Each name is imported on first use, because torch and Ray take seconds to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.lazy import lazy_names

if TYPE_CHECKING:
    from baton.training import run as run
    from service.config import Config as Config
    from service.config import load_config as load_config
    from service.errors import BatonError as BatonError
    from service.errors import UserError as UserError
    from service.handoff.batches.estimators import estimator as estimator
    from service.learn.losses.policy_losses import LossInputs as LossInputs
    from service.learn.losses.policy_losses import LossTerms as LossTerms
    from service.learn.losses.policy_losses import policy_loss as policy_loss
    from service.rollout.chat.tools import tool_answer as tool_answer
    from service.rollout.chat.tools import tool_calls as tool_calls
    from service.rollout.child_main import serve_child as serve_child
    from service.rollout.child_process import ChildDied as ChildDied
    from service.rollout.child_process import ChildProcesses as ChildProcesses
    from service.rollout.environment import Agent as Agent
    from service.rollout.environment import AgentSession as AgentSession
    from service.rollout.environment import Environment as Environment
    from service.rollout.environment import Message as Message
    from service.rollout.environment import OversizedOutput as OversizedOutput
    from service.rollout.environment import StepResult as StepResult
    from service.rollout.environment import Task as Task
    from service.rollout.environment import is_text as is_text
    from service.rollout.environment import tagged as tagged
    from service.rollout.prompts.dataset import load_tasks as load_tasks
    from service.scorers.user import Trajectory as Trajectory
    from service.scorers.user import Turn as Turn

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "baton.training": ("run",),
        "service.config": ("Config", "load_config"),
        "service.errors": ("BatonError", "UserError"),
        "service.handoff.batches.estimators": ("estimator",),
        "service.learn.losses.policy_losses": ("LossInputs", "LossTerms", "policy_loss"),
        "service.rollout.chat.tools": ("tool_answer", "tool_calls"),
        "service.rollout.child_main": ("serve_child",),
        "service.rollout.child_process": ("ChildDied", "ChildProcesses"),
        "service.rollout.environment": (
            "Agent",
            "AgentSession",
            "Environment",
            "Message",
            "OversizedOutput",
            "StepResult",
            "Task",
            "is_text",
            "tagged",
        ),
        "service.rollout.prompts.dataset": ("load_tasks",),
        "service.scorers.user": ("Trajectory", "Turn"),
    },
)
