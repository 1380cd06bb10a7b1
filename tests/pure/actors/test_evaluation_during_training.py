"""A run's evaluations: what becomes of their numbers, and of one that does not end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from actors.evaluation.during_training import Evaluations
from actors.generator.generator_pool import GeneratorPool
from actors.weights.delivery import Kept
from service.config import load_config
from service.errors import RunFailed
from service.evaluation.scores import EvalShard, EvalTrajectory, Evaluation, summarize
from service.run.folder import read_lines
from service.run.writer import RunWriter
from service.types import PolicyVersion
from tests.pure.actors.fakes import Method, died


class Pool:
    """Engines whose evaluations come out as told: scores, an error, or never; and what they keep."""

    def __init__(self, engines: int = 2) -> None:
        self.step, self.evaluating, self.weights = 0, set[str](), self
        self.engines = {f"generator-{number}": Engine(self) for number in range(engines)}
        self.kept: list[Kept] = []
        self.let_go: list[int] = []
        self.fails: dict[str, BaseException] = {}
        """Set -> what its next evaluation raises."""
        self.endless: set[str] = set()
        self.cancelled = 0
        self.rows: list[int | None] = []
        self.asked: list[tuple[str, str, int | None]] = []
        """(engine, set, version) of each call."""

    def up(self) -> dict[str, Any]:
        return dict(self.engines)

    def keep(self, up: dict[str, Any], count: int) -> Kept | None:
        if len(up) <= count:
            return None
        names = list(up)[:count]
        self.kept.append(Kept(PolicyVersion(1, self.step), {name: up[name] for name in names}, None))
        return self.kept[-1]

    async def release(self, kept: Kept) -> None:
        self.let_go.append(kept.version.step)


class Engine:
    """A generator of which only the evaluation is called."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.evaluate = Method(self._evaluate)

    async def _evaluate(
        self, name: str, tasks_file: str, n_samples: int, shard: EvalShard, version: int | None = None
    ) -> list[EvalTrajectory]:
        pool = self.pool
        pool.rows.append(shard.most)
        pool.asked.append((next(n for n, engine in pool.engines.items() if engine is self), name, version))
        if name in pool.endless:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pool.cancelled += 1
                raise
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
    await asyncio.sleep(0)
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


BESIDE = ["data.eval_mode=beside", "data.eval_every=4", "generator.engines=2"]


async def settled(made: Evaluations) -> None:
    async with asyncio.timeout(60):
        while made._running is not None and not made._running.done():
            await asyncio.sleep(0)


async def test_beside_training_the_numbers_of_a_step_come_later_and_say_of_which_step_they_are(tmp_path: Path) -> None:
    pool = Pool()
    made, said = evaluations(tmp_path, pool, ["dev"], [], *BESIDE)
    pool.step = 4
    assert made.begin(4), "training goes on"
    assert "eval/step" not in made.numbers(4)
    pool.step = 5
    await settled(made)
    numbers = made.numbers(5)
    assert (numbers["eval/step"], numbers["eval/lag_intervals"]) == (4, 0.25)
    assert dev().metrics().items() <= numbers.items()
    assert pool.asked == [("generator-0", "dev", PolicyVersion(1, 4).pack())], "one engine, and its version is checked"
    assert pool.let_go == [4] and pool.evaluating == set()
    assert [line["step"] for line in read_lines(tmp_path / "evaluations.jsonl")] == [4]
    assert "eval/step" not in made.numbers(6), "once"
    pool.step = 8
    assert made.begin(8)
    await settled(made)
    pool.step = 12
    assert made.begin(12) and not any("left out" in line for line in said), "that of step 8 has ended"


async def test_an_evaluation_that_is_due_while_another_runs_is_left_out_and_the_lag_grows(tmp_path: Path) -> None:
    pool = Pool()
    pool.endless.add("dev")
    made, said = evaluations(tmp_path, pool, ["dev"], [], *BESIDE)
    assert made.begin(0) and made.begin(4)
    await asyncio.sleep(0)
    assert said == ["the evaluation after step 4 is left out: that of step 0 still runs"]
    assert made.numbers(8)["eval/lag_intervals"] == 2.0
    made.continue_from(0)
    assert made._running is not None, "its step is still a step of the run"


async def test_where_the_engine_is_lost_the_evaluation_begins_anew_with_the_newest_weights(tmp_path: Path) -> None:
    pool = Pool()
    pool.fails["dev"] = died()
    made, said = evaluations(tmp_path, pool, ["dev"], [], *BESIDE)
    assert made.begin(0)
    pool.step = 3
    await settled(made)
    assert "the evaluation after step 0 begins anew" in said[0]
    assert [line["step"] for line in read_lines(tmp_path / "evaluations.jsonl")] == [3]
    assert pool.let_go == [0, 3] and made.numbers(3)["eval/step"] == 3


async def test_an_evaluation_of_a_step_that_the_trainer_went_back_from_is_ended(tmp_path: Path) -> None:
    pool = Pool()
    pool.endless.add("dev")
    made, _ = evaluations(tmp_path, pool, ["dev"], [], *BESIDE)
    made._folder.append_evaluations(0, [dev().record()])
    pool.step = 4
    assert made.begin(4)
    await asyncio.sleep(0.01)
    assert not made.continue_from(3), "that of step 0 is there"
    await asyncio.sleep(0.01)
    assert pool.let_go == [4] and made.begin(4), "it is evaluated again"


@pytest.mark.parametrize(
    ("recorded", "step", "missing"), [([0], 5, True), ([0, 4], 5, False), ([], 0, True), ([0, 4], 8, True)]
)
async def test_a_run_that_was_ended_amid_an_evaluation_evaluates_when_it_goes_on(
    tmp_path: Path, recorded: list[int], step: int, missing: bool
) -> None:
    made, _ = evaluations(tmp_path, Pool(), ["dev"], [], *BESIDE)
    for done in recorded:
        made._folder.append_evaluations(done, [dev().record()])
    assert made.continue_from(step) is missing


@pytest.mark.parametrize(("engines", "step", "mode"), [(1, 4, "beside"), (2, 50, "beside"), (2, 4, "pause")])
async def test_training_waits_where_no_engine_would_go_on_after_the_last_step_and_where_it_is_to(
    tmp_path: Path, engines: int, step: int, mode: str
) -> None:
    made, _ = evaluations(tmp_path, Pool(engines), ["dev"], [], *BESIDE, f"data.eval_mode={mode}")
    assert not made.begin(step)
