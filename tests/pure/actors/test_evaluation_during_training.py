"""A run's evaluations: what becomes of their numbers, and of one that does not end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from actors.evaluation.during_training import Evaluations
from actors.generator.generator_pool import GeneratorPool
from actors.observe.telemetry import RunTelemetry
from actors.trainer.group import TrainerGroup
from service.config import Config, load_config
from service.config.rollout import DataConfig
from service.errors import RunFailed
from service.evaluation.scores import EvalShard, EvalTrajectory, Evaluation, summarize
from service.run.folder import read_lines
from service.run.writer import RunWriter


class Sets:
    """A pool that knows how its sets come out: an evaluation, none, or never."""

    def __init__(self, found: dict[str, Evaluation | None]) -> None:
        self.found = found
        self.cancelled = 0
        self.rows: list[int | None] = []

    async def evaluate(self, name: str, tasks_file: Path, n_samples: int, most: int | None) -> Evaluation | None:
        self.rows.append(most)
        if name in self.found:
            return self.found[name]
        try:
            return await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def dev() -> Evaluation:
    return summarize("dev", [EvalTrajectory("a", 1.0, 2, 9, "stop"), EvalTrajectory("a", 0.0, 4, 9, "stop")])


def evaluations(folder: Path, sets: Sets, names: list[str], stops: list[bool]) -> tuple[Evaluations, list[str]]:
    said: list[str] = []
    files = {name: folder / f"{name}.jsonl" for name in names}
    pool = cast(GeneratorPool, sets)
    made = Evaluations(Config(), pool, RunWriter(folder), files, said.append, lambda: bool(stops and stops.pop(0)))
    return made, said


@pytest.mark.asyncio
async def test_a_set_that_could_not_be_ended_is_left_out_and_the_others_are_written(tmp_path: Path) -> None:
    made, said = evaluations(tmp_path, Sets({"lost": None, "dev": dev()}), ["lost", "dev"], [])
    numbers = await made.at(40)
    assert numbers.pop("timing/eval") >= 0
    assert numbers == dev().metrics()
    (line,) = read_lines(tmp_path / "evaluations.jsonl")
    assert line == {"step": 40, **dev().record()}
    assert (line["avg_score"], line["pass_at_1"], line["pass_at_2"]) == (0.5, 0.5, 1.0)
    assert said[0] == "evaluation after step 40:" and said[2].split()[0] == "dev"


@pytest.mark.asyncio
async def test_a_sample_is_evaluated_while_training_and_every_row_after_the_last_step(tmp_path: Path) -> None:
    sets = Sets({"dev": dev()})
    made, _ = evaluations(tmp_path, sets, ["dev"], [])
    last = made.config.run.max_steps
    for step in (0, last - 1, last):
        await made.at(step)
    assert made.config.data.eval_rows is not None
    assert sets.rows == [made.config.data.eval_rows, made.config.data.eval_rows, None]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], []),
        (["data.eval_every=4"], [0, 4, 8, 10]),
        (["data.eval_every=4", "weights.sync_every=4", "buffer.lookahead=3"], [0, 4, 8]),
    ],
)
def test_evaluations_are_due_at_the_beginning_every_few_steps_and_at_the_end(
    tmp_path: Path, overrides: list[str], steps: list[int]
) -> None:
    config = load_config([Path("configs/quickstart.yaml")], ["data.eval_make_rows=8", "run.max_steps=10", *overrides])
    made, _ = evaluations(tmp_path, Sets({}), [], [])
    made = replace(made, config=config)
    assert [step for step in range(11) if made.are_due(step)] == steps


@pytest.mark.asyncio
async def test_a_stopped_run_does_not_wait_for_its_evaluation(tmp_path: Path) -> None:
    sets = Sets({})
    made, said = evaluations(tmp_path, sets, ["endless"], [False, True])
    async with asyncio.timeout(120):
        numbers = await made.at(1)
    await asyncio.sleep(0)
    assert (list(numbers), said, sets.cancelled) == (["timing/eval"], [], 1)
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_a_trainer_that_goes_back_evaluates_the_later_steps_again(tmp_path: Path) -> None:
    folder = RunWriter(tmp_path)
    for step in (0, 20, 40):
        folder.append_evaluations(step, [dev().record()])
    folder.cut_after(20)
    assert [line["step"] for line in read_lines(tmp_path / "evaluations.jsonl")] == [0, 20]


class Engine:
    """A generator of which only the evaluation is called."""

    def __init__(self, played: Callable[[EvalShard], Awaitable[list[EvalTrajectory]]]) -> None:
        self.played = played
        self.evaluate = self

    def remote(self, name: str, tasks_file: str, n_samples: int, shard: EvalShard) -> Awaitable[list[EvalTrajectory]]:
        return self.played(shard)


async def fine(shard: EvalShard) -> list[EvalTrajectory]:
    return [EvalTrajectory(f"p-{row}", float(row), 1, 1, "stop") for row in shard.rows(4)]


async def dies(shard: EvalShard) -> list[EvalTrajectory]:
    raise RunFailed("the engine core died; its log says why")


async def hangs(shard: EvalShard) -> list[EvalTrajectory]:
    await asyncio.Event().wait()
    return []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("second", "why"), [(fine, None), (dies, "the engine core died"), (hangs, "given up after 0 s")]
)
async def test_an_evaluation_is_split_over_the_engines_and_given_up_where_one_of_them_fails(
    second: Callable[[EvalShard], Awaitable[list[EvalTrajectory]]], why: str | None
) -> None:
    said: list[str] = []
    config = Config(data=DataConfig(eval_deadline=0.2 if second is hangs else 100.0))
    engines = [Engine(fine), Engine(second)]
    pool = GeneratorPool(config, engines, cast(TrainerGroup, None), cast(RunTelemetry, None), said.append)
    found = await pool.evaluate("dev", Path("dev.jsonl"), 1)
    if why is None:
        assert found is not None and (found.n_prompts, found.avg_score, said) == (4, 1.5, [])
    else:
        assert found is None and len(said) == 1 and why in said[0]
