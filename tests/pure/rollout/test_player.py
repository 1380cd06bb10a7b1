"""Episodes for training and for evaluation: their seeds, their temperature, and their room."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest

from actors.engine.run_player import RunPlayer
from baton.examples import lookup
from service.config import Config
from service.config.rollout import EnvConfig, GeneratorConfig
from service.config.tree import RunConfig
from service.evaluation.play import play_shard
from service.evaluation.scores import EvalShard, summarize
from service.handoff.steps.tables import step_objects
from service.rollout.chat.chat import Chat
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.engine import Generation, Sampling
from service.rollout.environment import Message, StepResult, Task
from service.rollout.prompts.rows import write_rows
from service.rollout.step_sinks import StepColumns
from service.types import EvaluationId, Int32s, Step, TrajectoryEnd, TrajectoryId
from tests.pure.rollout.conftest import ScriptedEngine
from tests.pure.rollout.test_agent import optimal

HERE, BAD = "tests.pure.rollout.test_player", "tests.pure.rollout.misbehaving"
QUESTION = Task("p-0", (Message(role="user", content="what is the age of fox ?"),), "")


class Seeded:
    """Ends at once, and keeps the seeds that it was given."""

    seeds: ClassVar[list[tuple[str, int]]] = []

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        self.seeds.append((task.uid, seed))
        return task.prompt

    async def step(self, text: str) -> StepResult:
        return StepResult((), 1.0, True, {"right": 1.0})

    async def close(self) -> None:
        pass


class Parses(Seeded):
    async def step(self, text: str) -> StepResult:
        return StepResult((), float(json.loads(text)), True)


@pytest.fixture
def seeds() -> Iterator[list[tuple[str, int]]]:
    Seeded.seeds.clear()
    yield Seeded.seeds
    Seeded.seeds.clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    make_tokenizer(folder, lookup.vocabulary())
    return folder


def player(model: Path, name: str = f"{HERE}:Seeded", **env: Any) -> tuple[RunPlayer, ScriptedEngine]:
    engine = ScriptedEngine(Chat(load_tokenizer(model)), lambda words: "answer 17")
    options = {"mood": "owl"} if "mood" in (model / "chat_template.jinja").read_text() else {}
    config = Config(
        run=RunConfig(seed=3),
        env=EnvConfig(name=name, trusted_modules=(HERE, BAD), **env),
        generator=GeneratorConfig(
            max_input_length=64, max_generate_length=8, temperature=0.9, chat_template_options=options
        ),
    )
    return RunPlayer(config, model, engine), engine


def prompts(path: Path, n: int) -> Path:
    write_rows(path, [{"uid": f"p-{i}", "prompt": "what is the age of fox ?"} for i in range(n)])
    return path


async def played(plays: RunPlayer, group_id: int, sample: int = 0, task: Task = QUESTION) -> list[Step | TrajectoryEnd]:
    columns = StepColumns()
    end = await plays.play(TrajectoryId(group_id, sample), task, columns)
    return [*step_objects(columns.steps()), end]


async def test_the_samples_of_a_group_share_a_seed_and_evaluations_have_seeds_of_their_own_the_same_every_time(
    model: Path, tmp_path: Path, seeds: list[tuple[str, int]]
) -> None:
    path, (plays, _) = prompts(tmp_path / "dev.jsonl", 4), player(model)
    await play_shard(plays, "dev", path, 2, EvalShard(), concurrency=3)
    at_once = sorted(seeds)
    seeds.clear()
    for number in (1, 0):
        await play_shard(player(model)[0], "dev", path, 2, EvalShard(number, 2), concurrency=1)
    assert sorted(seeds) == at_once and len(at_once) == 8 and len(set(at_once)) == 4
    seeds.clear()
    for group_id, sample in ((0, 0), (0, 1), (1, 0), (2, 0), (3, 0)):
        *_, end = await played(plays, group_id, sample)
        assert isinstance(end, TrajectoryEnd) and end.info == f'{{"{HERE}:Seeded":{{"right":1.0}}}}'
    first, second, *others = (seed for _, seed in seeds)
    assert first == second and len({first, *others, *(seed for _, seed in at_once)}) == 8


class Crowded(ScriptedEngine):
    """Keeps the ids of its requests, and how many of them there were at once."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, optimal)
        self.ids: set[str] = set()
        self.running = self.most = 0

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        self.ids.add(request_id.partition("/turn=")[0])
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        return await super().generate(prompt_ids, sampling, request_id)


async def test_an_evaluation_plays_every_sample_of_every_prompt_and_no_more_than_allowed_at_once(
    model: Path, tmp_path: Path
) -> None:
    engine = Crowded(Chat(load_tokenizer(model)))
    write_rows(tmp_path / "dev.jsonl", lookup.rows(5, 0))
    plays = RunPlayer(Config(), model, engine)
    found = summarize("dev", await play_shard(plays, "dev", tmp_path / "dev.jsonl", 3, EvalShard(), concurrency=4))
    assert [found.scores[name] for name in ("avg_score", "pass_at_1", "pass_at_2", "pass_at_3")] == [1.0] * 4
    assert found.n_trajectories == 15
    assert engine.ids == {str(EvaluationId(row, sample)) for row in range(5) for sample in range(3)}
    assert not engine.ids & {str(TrajectoryId(group_id, sample)) for group_id in range(5) for sample in range(3)}
    assert engine.most == 4


async def test_an_evaluation_has_its_own_temperature_and_no_supports_and_training_its_own(
    model: Path, tmp_path: Path
) -> None:
    plays, engine = player(model)
    for temperature, wanted in ((None, 0.9), (0.0, 0.0), (0.5, 0.5)):
        await play_shard(plays, "dev", prompts(tmp_path / "dev.jsonl", 1), 1, EvalShard(), 1, temperature)
        await played(plays, 0)
        asked = [(sampling.temperature, sampling.with_supports) for sampling in engine.samplings[-2:]]
        assert asked == [(wanted, False), (0.9, True)]


async def test_isolated_episodes_beyond_the_bound_wait_for_a_process_instead_of_starting_one(model: Path) -> None:
    plays, _ = player(model, "lookup", isolation="process", max_processes=1, max_turns=1)
    (row,) = lookup.rows(1, 0)
    task = Task("p-0", QUESTION.prompt, "", row["reward_spec"], row["extra_info"])
    episodes = await asyncio.gather(*(played(plays, i, task=task) for i in range(3)))
    assert [items[-1].stop_reason for items in episodes] == ["stop"] * 3
    lines = [child.info["cmdline"] or [] for child in psutil.process_iter(["cmdline", "ppid"]) if ours(child)]
    assert sum("service.rollout.factory" in line for line in lines) == 1
    await plays.close()


def ours(process: psutil.Process) -> bool:
    return bool(process.info["ppid"] == os.getpid())


async def test_the_configured_options_of_the_chat_template_reach_the_prompt(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, lookup.vocabulary())
    template = "{{ mood }} {% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    plays, engine = player(tmp_path)
    await played(plays, 0)
    assert engine.chat.text(np.asarray(engine.prompts[0])) == "owl what is the age of fox ?"


async def test_what_an_environment_does_to_its_row_is_nothing_to_the_other_trajectories_of_it(model: Path) -> None:
    plays, engine = player(model, f"{BAD}:Spends", max_turns=1)
    task = Task("p-0", (Message(role="user", content="what is"),), "", extra_info={"secret": "17"})
    for sample in range(2):
        await played(plays, 0, sample, task)
    assert [engine.chat.text(np.asarray(prompt)) for prompt in engine.prompts] == ["user what is 17 assistant"] * 2


@pytest.mark.parametrize(
    ("name", "isolation", "told"),
    [
        (f"{BAD}:Unmakeable", "none", "nobody listens"),
        (f"{BAD}:Raises", "none", r"KeyError: 'gone' \(misbehaving\.py:\d+\)$"),
        (f"{BAD}:Raises", "process", r"KeyError: 'gone' \(misbehaving\.py:\d+\)$"),
        (f"{HERE}:Parses", "none", r"JSONDecodeError: .* \(test_player\.py:\d+, in decoder\.py:\d+\)$"),
    ],
)
async def test_what_an_environment_or_a_library_raised_is_told_with_the_line_that_raised_it(
    model: Path, name: str, isolation: str, told: str
) -> None:
    plays, _ = player(model, name, isolation=isolation, step_deadline=240.0)
    (end,) = await played(plays, 0)
    await plays.close()
    assert end.stop_reason == "environment_error"
    assert re.search(told, plays.failures["environment_error"])
