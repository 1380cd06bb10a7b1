"""Shared prefixes are computed once, and ranks share the tokens of a micro-batch, and nothing else changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.sequence_parallel import LEAST, SHAPE, VOCABULARY, train
from service.config.core_settings import batch_settings
from service.config.learn import LoraConfig, TrainerConfig
from service.config.tree import Config
from service.learn.learner import Learner
from service.learn.model.policy import Policy
from service.learn.model.tiny_model import make_model
from service.learn.settings import LearnSettings
from service.learn.supervised import SupervisedSteps
from service.types import MiniBatch, SupervisedRow
from tests.pure.learn.builders import CPU, made_rows, mini_batch, settings, with_supports
from tests.pure.learn.families import replayed, saved
from tests.pure.learn.outcomes import PACKED, SHARED, Outcome, assert_same, configured, exact, moved, outcome
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.trees import tree_rows
from tests.pure.learn.varlen import COMPILER_WARNS, as_on_gpu, eager_graphs

TRAJECTORIES = 5
FORMS = ["token_mean", "gspo, proximal", "sequence TIS", "masks", "kl k3"]
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
SEEDS = range(2)
CHECKPOINTED, COMPILED, NODES = ("gradient_checkpointing", True), ("compile", True), ("shard_within", "node")
pytestmark = COMPILER_WARNS


@pytest.fixture(autouse=True)
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    exact(monkeypatch)


def tree_batch(seed: int) -> MiniBatch:
    rows = tree_rows(seed, TRAJECTORIES)
    half = len(rows) // 2
    return supported(mini_batch([[rows[:half], rows[half:]]], TRAJECTORIES), seed)


def supported(batch: MiniBatch, seed: int) -> MiniBatch:
    """The mini-batch of a seed: with supports if the seed is odd."""
    return (
        replace(batch, ranks=tuple(tuple(map(with_supports, micros)) for micros in batch.ranks)) if seed % 2 else batch
    )


@pytest.mark.parametrize("trees", [5, pytest.param(20, marks=pytest.mark.full)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("way", FORMS)
def test_random_trees_have_the_metrics_and_gradients_of_packed_rows(
    model_folder: Path, way: str, dtype: str, trees: int
) -> None:
    ours, expected = (moved(configured(way, form, dtype), model_folder, tree_batch(0)) for form in (SHARED, PACKED))
    first = 20 * FORMS.index(way)
    for batch in map(tree_batch, range(first, first + trees)):
        assert_same(outcome(ours, batch), outcome(expected, batch), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("on_gpu", "checkpointing", "compiled"),
    [
        (False, True, False),
        (True, False, False),
        (True, True, True),
        pytest.param(False, True, True, marks=pytest.mark.full),
    ],
)
def test_so_they_have_with_every_kernel_compiled_and_with_checkpointing(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, checkpointing: bool, compiled: bool
) -> None:
    eager_graphs(monkeypatch)
    if on_gpu:
        as_on_gpu(monkeypatch)
    config = configured("gspo", SHARED, gradient_checkpointing=checkpointing, compile=compiled)
    ours, expected = (moved(each, model_folder, tree_batch(0)) for each in (config, configured("gspo")))
    for batch in map(tree_batch, range(2 if compiled else 6)):
        assert_same(outcome(ours, batch), outcome(expected, batch), 1e-9)


class Case(NamedTuple):
    """How ranks train some mini-batches."""

    way: str
    layout: str
    dtype: str
    parts: int = 1
    """Groups of ranks; all ranks of a group train the same part of each mini-batch."""
    trainer: tuple[tuple[str, Any], ...] = ()
    experts: bool = False
    variable_length: bool = False
    """Whether a stand-in for the variable-length kernel of a GPU computes attention."""

    def config(self, world_size: int) -> LearnSettings:
        sharing = {"ranks": world_size, "sequence_parallel": world_size // self.parts}
        return configured(self.way, self.layout, self.dtype, **sharing, **dict(self.trainer))

    def batch(self, seed: int, parts: int) -> MiniBatch:
        """Two micro-batches for each part, the last of them empty; all rows of a trajectory in one part."""
        rows = tree_rows(seed, TRAJECTORIES)
        of_part = [[row for row in rows if row.trajectory % parts == part] for part in range(parts)]
        ranks = [[mine[: len(mine) // 2], mine[len(mine) // 2 :]] for mine in of_part]
        ranks[-1] = [[row for micro in ranks[-1] for row in micro], []]
        batch = supported(mini_batch(ranks, TRAJECTORIES), seed)
        if not self.experts:
            return batch
        return replace(batch, ranks=tuple(tuple(replayed(micro, 3, 0.3) for micro in micros) for micros in batch.ranks))


def of_rank(rank: int, world_size: int, folder: Path, case: Case) -> list[Outcome]:
    """What each mini-batch leads to on a rank."""
    nodes = [str(number // 2) for number in range(world_size)]
    with pytest.MonkeyPatch.context() as patch:
        exact(patch)
        eager_graphs(patch)
        if case.variable_length:
            as_on_gpu(patch)
        config, batches = case.config(world_size), [case.batch(seed, case.parts) for seed in SEEDS]
        policy = Policy(config, folder, CPU, rank, world_size, nodes=nodes)
        learner = moved(config, folder, batches[0], rank, world_size, policy)
        return [outcome(learner, batch) for batch in batches]


def assert_those_of_one_rank(folder: Path, ranks: Ranks, world_size: int, case: Case) -> None:
    alone = moved(configured(case.way, PACKED, case.dtype), folder, tree_batch(0))
    expected = [outcome(alone, case.batch(seed, 1)) for seed in SEEDS]
    for found in ranks(world_size, of_rank, folder, case):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs, TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        *((2, Case(way, layout, "float64")) for way in FORMS for layout in (PACKED, SHARED)),
        (4, Case("gspo, proximal", SHARED, "float64")),  # more ranks than key heads
        (4, Case("sequence TIS", PACKED, "float64", parts=2, trainer=(CHECKPOINTED, NODES))),
        (2, Case("masks", SHARED, "float64", variable_length=True)),
        (2, Case("kl k3", SHARED, "float64", parts=2)),  # ranks that share no tokens
        (2, Case("kl k3", PACKED, "float32")),
        pytest.param(4, Case("kl k3", SHARED, "float32", parts=2), marks=pytest.mark.full),
        pytest.param(4, Case("masks", PACKED, "float32"), marks=pytest.mark.full),
        pytest.param(2, Case("gspo", SHARED, "float64", trainer=(CHECKPOINTED, COMPILED)), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ranks_that_share_tokens_have_the_metrics_and_gradients_of_one(
    model_folder: Path, ranks: Ranks, world_size: int, case: Case
) -> None:
    assert_those_of_one_rank(model_folder, ranks, world_size, case)


def test_recorded_experts_are_replayed_where_their_tokens_are(ranks: Ranks, tmp_path: Path) -> None:
    case = Case("token_mean", PACKED, "float32", experts=True)
    assert_those_of_one_rank(saved("qwen3_moe", tmp_path), ranks, 2, case)


ALGORITHMS: list[dict[str, Any]] = [{"loss": "gspo"}, {"reduction": "trajectory_mean", "kl_coef": 0.5}]
ADAPTER = LoraConfig(rank=4)


def steps(rank: int, world_size: int, folder: Path, batch: MiniBatch) -> list[dict[str, float]]:
    """Metrics of two steps with each algorithm, of an adapter too, and the losses of two supervised steps."""
    found: list[dict[str, float]] = []
    for algorithm, lora in ((ALGORITHMS[1], ADAPTER), *((algorithm, None) for algorithm in ALGORITHMS)):
        config = settings(algorithm, {"ranks": world_size, "sequence_parallel": world_size}, lora=lora)
        learner = Learner(config, folder, CPU, rank, world_size)
        found += [learner.step(batch).metrics for _ in range(2)]
    supervised = SupervisedSteps(config, learner.policy)
    rows = [SupervisedRow(row.token_ids, row.loss_mask) for row in made_rows(6, seed=11)]
    return [*found, *({"loss": supervised.step(rows, 1e-3)} for _ in range(2))]


def test_steps_along_trajectories_of_adapters_and_on_demonstrations_are_those_of_one_rank(
    model_folder: Path, ranks: Ranks
) -> None:
    batch = mini_batch([[made_rows(5, seed=40)]], trajectories=5)
    batch.return_G[:] = [1.0, 0.0, 0.5, -1.0, 1.0]
    expected = steps(0, 1, model_folder, batch)
    assert expected[0]["policy/policy_loss"] != expected[1]["policy/policy_loss"]
    for of_rank in ranks(2, steps, model_folder, batch):
        for ours, theirs in zip(of_rank, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_a_mini_batch_is_dealt_to_groups_whose_budget_is_that_of_their_ranks_together() -> None:
    trainer = TrainerConfig(ranks=4, sequence_parallel=2, max_tokens_per_micro_batch=40)
    dealt = batch_settings(Config(trainer=trainer))
    assert (dealt.ranks, dealt.token_budget) == (2, 80)


ROW = 1600


def bytes_of_rank(rank: int, world_size: int, folder: Path) -> float:
    # the least of some: gloo's threads let go of what they have sent a little sooner or later
    return min(float(train(folder, rank, world_size, (ROW,), None)["bytes"]) for _ in range(4))


def test_a_rank_of_two_holds_1_7_times_less_than_one_alone(ranks: Ranks, tmp_path: Path) -> None:
    make_model(tmp_path, SHAPE, VOCABULARY, eos_token_id=2, pad_token_id=0, seed=0)
    alone, of_two = bytes_of_rank(0, 1, tmp_path), max(ranks(2, bytes_of_rank, tmp_path))
    assert alone >= LEAST[2] * of_two
