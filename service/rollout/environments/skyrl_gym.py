"""Environments of skyrl-gym (the extra `skyrl-gym`), its calls in a thread.

    env.name: skyrl_gym/search     env.options: {search_url: "http://127.0.0.1:8000/retrieve", topk: 3, max_turns: 4}

A row's columns become the environment's `extras`. skyrl-gym's post-processed action does not replace the policy's
response: the tokens stay those that were sampled, and `rewritten_actions` counts the cases.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, get_args

from service.errors import UserError
from service.rollout.environment import Message, StepResult, Task
from service.rollout.environments.own_thread import OwnThread


class SkyRLGym:
    """One episode of the environment that skyrl-gym registered as `env_id`; `options` are its `env_config`."""

    def __init__(self, env_id: str, max_turns: int = 4, **options: str | int | float | bool) -> None:
        try:
            self._gym = import_module("skyrl_gym")
        except ImportError as error:
            raise UserError("env.name: skyrl_gym is not installed; install baton-rl[skyrl-gym]") from error
        try:
            entry_point = self._gym.spec(env_id).entry_point
        except Exception as error:  # the library's own error classes exist only where it is installed
            raise UserError(f"env.name: skyrl-gym has no environment {env_id!r}: {error}") from error
        self._env_id = env_id
        self._max_turns = max_turns
        self._config = env_config(entry_point, options)
        self._env: Any = None
        self._thread = OwnThread()

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Make the environment and give it the row's prompt."""
        extras = {
            "max_turns": self._max_turns,
            **task.extra_info,
            "reward_spec": dict(task.reward_spec),
            "extra_info": dict(task.extra_info),
        }
        self._env = await self._thread.call(self._gym.make, self._env_id, env_config=self._config, extras=extras)
        messages, _ = await self._thread.call(self._env.init, [dict(message) for message in task.prompt])
        return [Message(role=message["role"], content=message["content"]) for message in messages]

    async def step(self, text: str) -> StepResult:
        """One action; the environment's own metrics become the `info` of the last step."""
        result = await self._thread.call(self._env.step, text)
        done = bool(result["done"])
        metrics = await self._thread.call(self._env.get_metrics) if done else {}
        info = {name: float(value) for name, value in metrics.items() if isinstance(value, bool | int | float)}
        if result.get("postprocessed_action") not in (None, text):
            info["rewritten_actions"] = 1.0
        return StepResult(result["observations"], result["reward"], done, info)

    async def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            await self._thread.call(self._env.close)
        self._thread.end()


def env_config(entry_point: str | Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """The options as the configuration class that the environment's constructor names, with its defaults."""
    make: Any = entry_point
    if isinstance(entry_point, str):
        module, _, name = entry_point.partition(":")
        make = getattr(import_module(module), name)
    parameter = inspect.signature(make).parameters.get("env_config")
    annotation = None if parameter is None else parameter.annotation
    for candidate in (annotation, *get_args(annotation)):
        if inspect.isclass(candidate) and is_dataclass(candidate):
            return candidate(**options)
    return SimpleNamespace(**options)
