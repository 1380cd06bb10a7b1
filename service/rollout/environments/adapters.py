"""Environments of other libraries. Each episode calls its library in a separate thread.

    env.name: skyrl_gym/search            an environment of skyrl-gym (the extra `skyrl-gym`)
    env.options: {search_url: "http://127.0.0.1:8000/retrieve", topk: 3, max_turns: 4}
    env.name: reasoning_gym/chain_sum     procedural tasks (the extra `reasoning-gym`): one question, partial credit
    env.options: {min_terms: 2, max_terms: 3}

With skyrl-gym a row's columns become the environment's `extras`. If the environment rewrites an action of the policy,
the recorded response still has the sampled tokens, and `rewritten_actions` counts the turn.

With reasoning-gym a row's `extra_info` contains the dataset's seed and size, and the question's index; `rows` makes
such rows. The answer is the text in the tag `<answer>`, or the whole response if it has no such tag.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import is_dataclass
from functools import lru_cache, partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar, get_args

from service.errors import UserError
from service.rollout.environment import Message, StepResult, Task, tagged

T = TypeVar("T")
P = ParamSpec("P")


class OwnThread:
    """A thread for the calls of one episode; a call that hangs in it blocks neither the engine nor other episodes."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="environment")

    async def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function in the thread and wait until it returns. A call that is cancelled also waits until the
        function has returned, so that a hanging thread is noticed."""
        loop = asyncio.get_running_loop()
        answer = loop.run_in_executor(self._executor, partial(function, *arguments, **named))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await asyncio.wait([answer])
            raise

    def end(self) -> None:
        """End the thread when its last call has returned."""
        self._executor.shutdown(wait=False)


class SkyRLGym:
    """One episode of the environment that skyrl-gym registers as `env_id`. `options`: the environment's
    `env_config`."""

    def __init__(self, env_id: str, max_turns: int = 4, **options: str | int | float | bool) -> None:
        self._gym = _library("skyrl_gym")
        try:
            entry_point = self._gym.spec(env_id).entry_point
        except Exception as error:  # the library's error classes exist only if it is installed
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
        """Pass one turn of the policy to the environment and return its answer. When the episode is done, `info`
        contains the metrics that skyrl-gym's environment computes."""
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


Option = str | int | float | bool


class ReasoningGym:
    """An episode that asks one question of reasoning-gym's dataset `name`. `options`: the dataset's options."""

    def __init__(self, name: str, **options: Option) -> None:
        self._name = name
        self._options = tuple(sorted(options.items()))
        _dataset(name, seed=0, size=1, options=self._options)  # refuses an unknown name or option at the start
        self._dataset: Any = None
        self._entry: Any = None
        self._thread = OwnThread()

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        """Generate the question of the row again, check that it is equal to the row's text, and return the row's
        prompt."""
        extra = task.extra_info
        self._dataset = _dataset(self._name, int(extra["seed"]), int(extra["size"]), self._options)
        self._entry = await self._thread.call(self._dataset.__getitem__, int(extra["index"]))
        if not any(self._entry["question"] in message["content"] for message in task.prompt):
            raise ValueError("the dataset makes another question than the row's; its version or options differ")
        return task.prompt

    async def step(self, text: str) -> StepResult:
        """Score the answer with the dataset's own function; the reward is between 0 and 1."""
        found = tagged(text, "answer")
        answer = (found[-1][1] if found else text).strip()
        score = float(await self._thread.call(self._dataset.score_answer, answer, self._entry))
        return StepResult((), score, True, {"solved": float(score == 1.0)})

    async def close(self) -> None:
        """End the thread."""
        self._thread.end()


class SyntheticRows:
    """Makes rows of one reasoning-gym dataset for `data.make_rows`; the environment needs the same options."""

    def __init__(self, name: str, options: Mapping[str, Option]) -> None:
        self._name = name
        self._options = tuple(sorted(options.items()))

    def rows(self, n: int, seed: int) -> list[dict[str, Any]]:
        """Make `n` questions as dataset rows."""
        dataset = _dataset(self._name, seed, n, self._options)
        return [
            {
                "uid": f"{self._name}-{seed}-{index}",
                "data_source": f"reasoning_gym/{self._name}",
                "prompt": [Message(role="user", content=dataset[index]["question"])],
                "env_class": f"reasoning_gym/{self._name}",
                "extra_info": {"seed": seed, "size": n, "index": index},
            }
            for index in range(n)
        ]


@lru_cache(maxsize=64)
def _dataset(name: str, seed: int, size: int, options: tuple[tuple[str, Option], ...]) -> Any:
    try:
        return _library("reasoning_gym").create_dataset(name, seed=seed, size=size, **dict(options))
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"env.name: reasoning-gym does not make {name!r} with {dict(options)}: {error}") from error


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        extra = name.replace("_", "-")
        raise UserError(f"env.name: {name} is not installed; install baton-rl[{extra}]") from error
