"""A run's evaluations: what becomes of their numbers, and of one that does not end."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from actors.evaluation.during_training import Evaluations
from actors.generator.generator_pool import GeneratorPool
from service.config import load_config
from service.errors import RunFailed
from service.evaluation.scores import EvalShard, EvalTrajectory, Evaluation, summarize
from service.run.folder import read_lines
from service.run.records.writer import RunWriter
from tests.pure.actors.fakes import Method


class Pool:
    """Engines whose evaluations come out as told: scores, an error, or never."""

    def __init__(self, engines: int = 2) -> None:
        self.evaluating = set[str]()
        self.engines = {f"generator-{number}": Engine(self) for number in range(engines)}
        self.fails: dict[str, BaseException] = {}
        """Set -> what its next evaluation raises."""
        self.endless: set[str] = set()
        self.rows: list[int | None] = []
        self.asked: list[tuple[str, str]] = []
        """(engine, set) of each call."""

    def up(self) -> dict[str, Any]:
        return dict(self.engines)


class Engine:
    """A generator of which only the evaluation is called."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.evaluate = Method(self._evaluate)

    async def _evaluate(self, name: str, tasks_file: str, n_samples: int, shard: EvalShard) -> list[EvalTrajectory]:
        pool = self.pool
        pool.rows.append(shard.most)
        pool.asked.append((next(n for n, engine in pool.engines.items() if engine is self), name))
        if name in pool.endless:
            await asyncio.Event().wait()
        if name in pool.fails:
            raise pool.fails.pop(name)
        return PLAYED if shard.number == 0 else []


PLAYED = [EvalTrajectory("a", 1.0, 2, 9, "stop"), EvalTrajectory("a", 0.0, 4, 9, "stop")]


def dev() -> Evaluation:
    return summarize("dev", PLAYED)


def evaluations(
    folder: Path, pool: Pool, names: list[str], stops: list[bool], *settings: str
) -> tuple[Evaluations, list[str]]:
    said: list[str] = []
    files = {name: folder / f"{name}.jsonl" for name in names}
    config = load_config([Path("configs/quickstart.yaml")], ["data.eval_make_rows=8", "run.max_steps=50", *settings])
    sections = config.data, config.run, config.weights.sync_every

    def stopped() -> bool:
        return bool(stops and stops.pop(0))

    made = Evaluations(*sections, cast(GeneratorPool, pool), RunWriter(folder), files, said.append, stopped)
    return made, said


async def test_a_set_that_could_not_be_ended_is_left_out_and_the_others_are_written(tmp_path: Path) -> None:
    pool = Pool()
    pool.fails["lost"] = RunFailed("the engine core died; its log says why")
    made, said = evaluations(tmp_path, pool, ["lost", "dev"], [])
    await made.at(40)
    numbers = made.numbers(40)
    assert numbers.pop("timing/eval") >= 0
    assert numbers == {**dev().metrics(), "eval/step": 40}
    (line,) = read_lines(tmp_path / "evaluations.jsonl")
    assert line == {"step": 40, **dev().record()}
    assert (line["avg_score"], line["pass_at_1"], line["pass_at_2"]) == (0.5, 0.5, 1.0)
    assert "given up: the engine core died" in said[0]
    assert said[1] == "evaluation after step 40:" and said[3].split()[0] == "dev"


async def test_a_sample_is_evaluated_while_training_and_every_row_after_the_last_step(tmp_path: Path) -> None:
    pool = Pool(engines=1)
    made, _ = evaluations(tmp_path, pool, ["dev"], [])
    for step in (0, 49, 50):
        await made.at(step)
    assert pool.rows == [512, 512, None]


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
    made, _ = evaluations(tmp_path, Pool(), [], [], "run.max_steps=10", *overrides)
    assert [step for step in range(11) if made.is_due(step)] == steps


async def test_a_stopped_run_does_not_wait_for_its_evaluation(tmp_path: Path) -> None:
    pool = Pool(engines=1)
    pool.endless.add("endless")
    made, said = evaluations(tmp_path, pool, ["endless"], [False, True])
    async with asyncio.timeout(120):
        await made.at(1)
    assert (list(made.numbers(1)), said) == (["timing/eval"], [])
    assert not (tmp_path / "evaluations.jsonl").exists()


def test_a_trainer_that_goes_back_evaluates_the_later_steps_again(tmp_path: Path) -> None:
    folder = RunWriter(tmp_path)
    for step in (0, 20, 40):
        folder.append_evaluations(step, [dev().record()])
    folder.cut_after(20)
    assert [line["step"] for line in read_lines(tmp_path / "evaluations.jsonl")] == [0, 20]


@pytest.mark.parametrize("why", [None, "the engine core died", "it took more than 0 s"])
async def test_an_evaluation_is_split_over_the_engines_and_given_up_where_one_of_them_fails(
    tmp_path: Path, why: str | None
) -> None:
    pool = Pool()
    if why == "the engine core died":
        pool.fails["dev"] = RunFailed("the engine core died; its log says why")
    elif why is not None:
        pool.endless.add("dev")
    deadline = 0.2 if pool.endless else 100.0
    made, said = evaluations(tmp_path, pool, ["dev"], [], f"data.eval_deadline={deadline}")
    found = await made.of_set("dev", Path("dev.jsonl"), 1)
    assert [engine for engine, *_ in pool.asked] == ["generator-0", "generator-1"]
    if why is None:
        assert found == dev() and said == []
    else:
        assert found is None and len(said) == 1 and why in said[0]
    assert pool.evaluating == set()


@pytest.mark.parametrize(
    ("recorded", "step", "missing"), [([0], 5, True), ([0, 4], 5, False), ([], 0, True), ([0, 4], 8, True)]
)
async def test_a_run_that_was_ended_amid_an_evaluation_evaluates_when_it_goes_on(
    tmp_path: Path, recorded: list[int], step: int, missing: bool
) -> None:
    made, _ = evaluations(tmp_path, Pool(), ["dev"], [], "data.eval_every=4")
    for done in recorded:
        made._folder.append_evaluations(done, [dev().record()])
    assert made.continue_from(step) is missing
