"""The interface for users; names that are neither here nor in `baton.library` may change without notice.

run, Config, load_config, BatonError             a training: `run("mine.yaml")` does what `baton run` does
Environment, Task, Message, StepResult           an environment (docs/environments.md)
OversizedOutput, UserError                       raised for an answer that is too long, for settings that are wrong
load_tasks                                       the tasks of a dataset, for the tests of an environment
is_text, tagged, tool_calls, tool_answer         reading what a policy wrote
RetrievalClient                                  a search server that an environment asks
ChildProcesses, ChildDied, serve_child           code of an environment in processes of its own
Agent, AgentSession                              an agent that calls the policy over HTTP (docs/agents.md)
Trajectory, Turn                                 what a scorer of rewards is given (docs/scorers.md)
estimator, policy_loss, LossInputs, LossTerms    advantages and losses (docs/learning.md)

Each name is imported when it is first asked for, because torch and Ray take seconds to load.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.training import run
    from service.config import Config, load_config
    from service.errors import BatonError, UserError
    from service.handoff.batches.advantages import estimator
    from service.learn.losses.loss import LossInputs, LossTerms, policy_loss
    from service.rollout.chat.tools import answer as tool_answer
    from service.rollout.chat.tools import tool_calls
    from service.rollout.child_main import serve as serve_child
    from service.rollout.child_process import ChildDied, ChildProcesses
    from service.rollout.environment import (
        Agent,
        AgentSession,
        Environment,
        Message,
        OversizedOutput,
        StepResult,
        Task,
        is_text,
        tagged,
    )
    from service.rollout.environments.retrieval_client import RetrievalClient
    from service.rollout.prompts.dataset import load_tasks
    from service.scorers.scored_trajectories import Trajectory, Turn

__all__ = [
    "Agent",
    "AgentSession",
    "BatonError",
    "ChildDied",
    "ChildProcesses",
    "Config",
    "Environment",
    "LossInputs",
    "LossTerms",
    "Message",
    "OversizedOutput",
    "RetrievalClient",
    "StepResult",
    "Task",
    "Trajectory",
    "Turn",
    "UserError",
    "estimator",
    "is_text",
    "load_config",
    "load_tasks",
    "policy_loss",
    "run",
    "serve_child",
    "tagged",
    "tool_answer",
    "tool_calls",
]

_HOMES = {
    "baton.training": ("run",),
    "service.config": ("Config", "load_config"),
    "service.errors": ("BatonError", "UserError"),
    "service.handoff.batches.advantages": ("estimator",),
    "service.learn.losses.loss": ("LossInputs", "LossTerms", "policy_loss"),
    "service.rollout.chat.tools": ("answer as tool_answer", "tool_calls"),
    "service.rollout.child_main": ("serve as serve_child",),
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
    "service.rollout.environments.retrieval_client": ("RetrievalClient",),
    "service.scorers.scored_trajectories": ("Trajectory", "Turn"),
}
"""Module -> the names that it gives."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        for given in names:
            there, _, here = given.partition(" as ")
            if name == (here or there):
                return getattr(import_module(home), there)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
