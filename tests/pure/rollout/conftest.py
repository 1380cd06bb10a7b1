"""A chat over the project's own tokenizer, and an engine that follows a script."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from baton.examples import lookup
from service.handoff.steps.tables import step_objects
from service.rollout.agent_loop import TrajectoryResult, run_trajectory
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.engine import AgentLimits, Generation, Sampling
from service.rollout.env_guard import EnvGuard, LeakedTasks
from service.rollout.environment import Environment, Message, StepResult, Task
from service.rollout.step_sinks import StepColumns
from service.types import Int32s, PolicyVersion, Step, TrajectoryEnd, TrajectoryId

VERSION = PolicyVersion(1, 5).pack()


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, lookup.vocabulary())
    return Chat(load_tokenizer(folder))


def templated(folder: Path, template: str) -> Chat:
    """A chat over the project's own tokenizer, with this template."""
    make_tokenizer(folder, lookup.vocabulary())
    (folder / "chat_template.jinja").write_text(template)
    return Chat(load_tokenizer(folder))


def leave_ids_out(folder: Path, n: int) -> None:
    """Give the last word of the tokenizer an id that is `n` higher."""
    file = folder / "tokenizer.json"
    vocabulary = (tokenizer := json.loads(file.read_text()))["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] += n
    file.write_text(json.dumps(tokenizer))


STRIPS_WHAT_STANDS_BEFORE_NONE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('none')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def stripping_chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """A chat whose template drops an earlier turn's words before `none`, as real ones drop its thoughts."""
    return templated(tmp_path_factory.mktemp("stripping"), STRIPS_WHAT_STANDS_BEFORE_NONE)


class ScriptedEngine:
    """Answers each prompt with what the script says about the conversation's words, and keeps what it was asked."""

    def __init__(self, chat: Chat, script: Callable[[list[str]], str | Generation]) -> None:
        self.chat = chat
        self.script = script
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        self.prompts.append(prompt_ids.tolist())
        self.samplings.append(sampling)
        said = self.script(self.chat.text(prompt_ids).split())
        if isinstance(said, Generation):
            return said
        return generated([*self.chat._special_tokens.encode(said).tolist(), self.chat.end_id])


def generated(token_ids: Sequence[int], stop_reason: str = "stop", sampled_end: bool = True) -> Generation:
    n = len(token_ids)
    return Generation(
        np.asarray(token_ids, dtype=np.int32),
        np.full(n, -0.5, dtype=np.float32),
        np.full(n, VERSION, dtype=np.int64),
        stop_reason,
        sampled_end,
    )


class ScriptedEnvironment:
    """Gives the scripted results one after the other; a result may be an exception to raise."""

    def __init__(self, results: Sequence[StepResult | BaseException]) -> None:
        self.results = list(results)
        self.heard: list[str] = []
        self.closed = 0

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        return task.prompt

    async def step(self, text: str) -> StepResult:
        self.heard.append(text)
        result = self.results.pop(0)
        if isinstance(result, BaseException):
            raise result
        return result

    async def close(self) -> None:
        self.closed += 1


def told(words: str, reward: float = 0.0, done: bool = False) -> StepResult:
    return StepResult([Message(role="user", content=words)], reward, done)


def limits(chat: Chat, **changed: object) -> AgentLimits:
    values: dict[str, object] = {
        "max_turns": 4,
        "max_input_length": 64,
        "step_deadline": 60.0,
        "request_deadline": 60.0,
        "sampling": Sampling(max_tokens=7, stop_token_ids=chat.end_ids),
    }
    return AgentLimits(**(values | changed))  # type: ignore[arg-type]


QUESTION = Task("p-0", (Message(role="user", content="what is the age of fox ?"),), "scripted")


async def play(
    chat: Chat,
    engine: ScriptedEngine | str,
    environment: Environment,
    task: Task = QUESTION,
    observe: Callable[[TrajectoryResult], None] | None = None,
    leaked: LeakedTasks | None = None,
    seed: int = 0,
    **changed: object,
) -> tuple[list[Step], TrajectoryEnd]:
    """One whole trajectory: its steps and its end. `engine`: a text, where it always answers with the same."""
    engine = ScriptedEngine(chat, lambda words: text) if isinstance(text := engine, str) else engine
    allowed = limits(chat, **changed)
    columns = StepColumns()
    of = TrajectoryId(3, 1)
    guard = EnvGuard("scripted", lambda: environment, allowed, leaked)
    played = await run_trajectory(of, task, guard, engine, chat, allowed, seed, columns)
    if columns.ends != [played.end]:
        raise AssertionError(f"one end: {columns.ends}")
    if observe is not None:
        observe(played)
    return step_objects(columns.steps()), played.end


def whole_prompts(steps: Sequence[Step]) -> list[list[int]]:
    """The full prompt of every step, put together from the extensions."""
    known: list[list[int]] = []
    prompts = []
    for step in steps:
        before = [] if step.extends is None else known[step.extends.step][: step.extends.length]
        prompts.append([*before, *step.prompt_ids.tolist()])
        known.append([*prompts[-1], *step.response_ids.tolist()])
    return prompts


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """The address of an application while it is served."""
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield "http://127.0.0.1:{1}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()
