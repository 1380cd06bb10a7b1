"""Environments of skyrl-gym (the extra `skyrl-gym`).

    env.name: skyrl_gym
    env.options: {env_id: search, search_url: "http://127.0.0.1:8000/retrieve", topk: 3, max_turns: 4}

A row's columns become the environment's `extras`. If the environment rewrites an action of the policy, the recorded
response still has the sampled tokens, and `rewritten_actions` counts the turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, get_args

import skyrl_gym

from baton import Message, StepResult, Task
from baton.examples.adapters.own_thread import OwnThread


class SkyRLGym:
    """One episode of the environment that skyrl-gym registers as `env_id`. `options`: its `env_config`."""

    def __init__(self, env_id: str, max_turns: int = 4, **options: str | int | float | bool) -> None:
        self._env_id, self._max_turns = env_id, max_turns
        self._config = env_config(skyrl_gym.spec(env_id).entry_point, options)
        self._env: Any = None
        self._thread = OwnThread()

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Make the environment and give it the row's prompt."""
        extra, spec = dict(task.extra_info), dict(task.reward_spec)
        extras = {"max_turns": self._max_turns, **extra, "reward_spec": spec, "extra_info": extra}
        self._env = await self._thread.call(skyrl_gym.make, self._env_id, env_config=self._config, extras=extras)
        messages, _ = await self._thread.call(self._env.init, [dict(message) for message in task.prompt])
        return [Message(role=message["role"], content=message["content"]) for message in messages]

    async def step(self, text: str) -> StepResult:
        """Return the environment's answer to a turn. In the last answer, `info` has the metrics of skyrl-gym."""
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
    """The options as an `env_config` object: an instance of the dataclass that the environment's constructor expects,
    or a simple namespace."""
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
