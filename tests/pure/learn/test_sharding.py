"""What the ranks of a sharded policy hold, wait for, publish and resume from; and the steps that they take."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.tensor import DTensor

from service.config.learn import LoraConfig
from service.errors import UserError
from service.learn.compile import stop_compiling
from service.learn.learner import Learner
from service.learn.model import policy, sharding
from service.learn.model.policy import Policy
from service.learn.model.sharding import local_shard, ranks_by_node
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, SHAPE, made_rows, mini_batch, settings
from tests.pure.learn.families import saved
from tests.pure.learn.outcomes import (
    MERGED_WAYS,
    TRAJECTORIES,
    WAYS,
    Outcome,
    assert_same,
    batch_in,
    configured,
    cut,
    exact,
    moved,
    outcome,
    reference,
)
from tests.pure.learn.ranks import Ranks

N_MICRO_BATCHES = 3
NODES = ["a", "b", "a", "b"]


def gradient_shares(rank: int, world_size: int, folder: Path) -> list[float]:
    """The share of the whole float32 gradient that a rank holds when each micro-batch after the first begins."""
    learner = Learner(settings(), folder, CPU, rank, world_size)
    model, shares = learner.policy.model, []

    def measure(*_: object) -> None:
        gradients = [parameter.grad for parameter in model.parameters()]
        held = sum(gradient.numel() for gradient in map(local_shard, filter(None.__ne__, gradients)))
        held += sum(gradient.numel() for gradient in whole_gradients(model))
        shares.append(held / sum(parameter.numel() for parameter in model.parameters()))

    model.register_forward_pre_hook(measure, prepend=True)  # before the weights are gathered
    micros = [made_rows(2, seed=seed) for seed in range(N_MICRO_BATCHES)]
    learner.accumulate(mini_batch([micros] * world_size, trajectories=2))
    return shares[1:]


def whole_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Gradients that FSDP2 keeps unsharded until it reduces them."""
    groups = (module._get_fsdp_state()._fsdp_param_group for module in model.modules() if hasattr(module, "unshard"))
    kept = [each.unsharded_accumulated_grad for group in groups if group is not None for each in group.fsdp_params]
    return [gradient for gradient in kept if gradient is not None and not isinstance(gradient, DTensor)]


def test_a_rank_holds_the_gradient_of_its_shard_only_between_micro_batches(model_folder: Path, ranks: Ranks) -> None:
    for shares in ranks(2, gradient_shares, model_folder):
        assert len(shares) == N_MICRO_BATCHES - 1
        # shards are cut at whole rows, so a share may be a little more than half
        assert all(0.3 < share < 0.7 for share in shares)


def export_on_a_slow_disk(rank: int, world_size: int, folder: Path, out: Path) -> bool:
    """Export; rank 0's disk takes no byte before rank 1 has returned, for a minute. Whether rank 0 wrote then."""
    learner, returned, written = Learner(settings(), folder, CPU, rank, world_size), out / "returned", [True]

    def write_folder(*_: object) -> None:
        deadline = time.monotonic() + 60
        while not returned.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        written[0] = returned.exists()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "write_folder", write_folder)
        learner.export(out / "final")
    if rank == 1:
        returned.touch()
    return written[0]


def test_no_rank_waits_in_a_collective_for_the_disk_of_rank_0(model_folder: Path, ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, export_on_a_slow_disk, model_folder, tmp_path) == [True, True]


KEPT: dict[str, dict[str, Any]] = {
    "gathered again": {"reshard_after_forward": True},
    "kept, layers computed again": {"reshard_after_forward": False, "gradient_checkpointing": True},
    "offloaded": {"cpu_offload": True},
}


def in_units(rank: int, world_size: int, folder: Path, batch: MiniBatch) -> dict[str, tuple[list[str], Any]]:
    """The names of the units and the outcome of each of `KEPT`, with layers that are sharded although they are small.

    The KL term takes passes without gradients in between, of other weights.
    """
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        exact(patch)
        patch.setattr(sharding, "SMALL_LAYER", 1)
        for name, trainer in KEPT.items():
            config = settings({"kl_coef": 5.0}, trainer={"ranks": world_size} | trainer, dtype="float64")
            learner = moved(config, folder, batch, rank, world_size)
            model = learner.policy.model
            units = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
            assert all(
                reduced_by(group) == [dist.ReduceOp.SUM] * 2
                for module in sharding._sharded(model)
                for group in module._get_fsdp_state()._fsdp_param_groups
            )
            found[name] = units, outcome(learner, batch)
    return found


def reduced_by(group: Any) -> list[Any]:
    """How NCCL would reduce the float32 gradients of these parameters over ranks, and over copies of the model."""
    over = group._reduce_scatter_process_group
    given = group.gradient_divide_factor, group.force_sum_reduction_for_comms
    before, after, *operations = _get_gradient_divide_factors(over, None, torch.float32, "cuda", *given)
    assert (before, after) == (None, 1.0)
    return operations


@pytest.mark.parametrize("tied", [True, False])
def test_layers_embedding_and_head_are_gathered_one_by_one_and_gradients_only_added(
    model_folder: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    exact(monkeypatch)
    folder = model_folder if tied else untied(model_folder, tmp_path / "untied")
    rows = reference()
    whole = mini_batch([[rows]], TRAJECTORIES)
    expected = outcome(moved(settings({"kl_coef": 5.0}, dtype="float64"), folder, whole), whole)
    batch = mini_batch([[rows[:2], rows[2:]], [[], []]], TRAJECTORIES)
    layers = [f"model.layers.{number}" for number in range(SHAPE["num_hidden_layers"])]
    for results in ranks(2, in_units, folder, batch):
        for name, (units, found) in results.items():
            assert units == ["", *layers] if tied else ["", "model.embed_tokens", *layers, "lm_head"], name
            assert_same(found, expected, 1e-9)


def untied(folder: Path, other: Path) -> Path:
    """A copy of the model with an output head of its own."""
    shutil.copytree(folder, other)
    described = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (other / "config.json").write_text(json.dumps(described))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return other


def waits_for_rank_1(rank: int, world_size: int, does: str, seconds: float, deadline: float) -> str:
    """What a sum over all ranks ends with, if rank 1 sleeps, needs another graph, or dies before it."""
    late: list[float] = [0.0]

    def compiled(graph: Any, _: Any) -> Any:
        time.sleep(late.pop() if late else seconds)
        return graph.forward

    layer = torch.compile(lambda x: x + 0, backend=compiled, dynamic=False)
    layer(torch.zeros(2))  # the trial
    if does == "needs another graph after the trial":
        stop_compiling()
    dist.barrier()
    sharding.set_collective_deadline(deadline)
    found = torch.ones(1)
    if does.startswith("needs another graph"):
        layer(torch.zeros(2 + (rank == 1)))
    elif rank == 1 and does == "dies":
        dist.destroy_process_group()  # the connections close as at the end of a process
        return "died"
    elif rank == 1:
        time.sleep(seconds)
    try:
        dist.all_reduce(found)
    except RuntimeError as error:
        return "too late" if "imed out" in str(error) or "timeout" in str(error).lower() else f"failed: {error}"
    return f"{found.item():.0f}"


WORLDS = [2, *(pytest.param(number, marks=pytest.mark.full) for number in (3, 4, 8))]


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_collective_waits_for_a_late_rank_as_long_as_its_deadline(ranks: Ranks, world_size: int) -> None:
    assert ranks.once(world_size, waits_for_rank_1, "sleeps", 1.5, 60.0) == [f"{world_size}"] * world_size
    found = ranks.once(world_size, waits_for_rank_1, "sleeps", 3.0, 1.0)
    assert "too late" in found and f"{world_size}" not in found
    # Its neighbours notice at once, whereupon the driver ends all; of many ranks some would wait for the deadline.
    found = ranks.once(world_size, waits_for_rank_1, "dies", 0.0, 3.0)
    assert found.pop(1) == "died" and f"{world_size}" not in found and any(each.startswith("failed") for each in found)


@pytest.mark.parametrize("world_size", WORLDS)
def test_after_the_trial_no_rank_waits_for_a_late_rank_that_would_compile(ranks: Ranks, world_size: int) -> None:
    found = ranks.once(world_size, waits_for_rank_1, "needs another graph", 8.0, 4.0)
    assert "too late" in found and f"{world_size}" not in found
    found = ranks.once(world_size, waits_for_rank_1, "needs another graph after the trial", 8.0, 4.0)
    assert found == [f"{world_size}"] * world_size


def steps_within(rank: int, world_size: int, folder: Path, parent: Path) -> dict[str, Any]:
    """A first step, and a second one after a resume, by ranks that shard over all and by ranks that shard within nodes.

    Each kind of ranks resumes from the other's checkpoint.
    """

    def learner(within: str) -> Learner:
        config = settings(trainer={"ranks": world_size, "shard_within": within})
        made = Policy(config, folder, CPU, rank, world_size, nodes=NODES)
        return Learner(config, folder, CPU, rank, world_size, made)

    batch = mini_batch([[made_rows(2, seed=seed)] for seed in range(world_size)], trajectories=2)
    found: dict[str, Any] = {}
    for within, other in (("all", "node"), ("node", "all")):
        first, second = learner(within), learner(other)
        reports = [first.step(batch)]
        first.save(parent / within)
        dist.barrier()
        second.load(parent / within)
        reports.append(second.step(batch))
        weights, masters = second.policy.weights(), first.policy.master_weights
        held = sum(master.numel() for master in masters.tensors.values())
        found[within] = {
            "steps": [report.metrics[f"policy/{name}"] for report in reports for name in ("policy_loss", "grad_norm")],
            "weights": [float(weight.double().square().sum()) for weight in (weights or {}).values()],
            "share": held / sum(parameter.numel() for parameter in masters.parameters.values()),
        }
    return found


def test_sharding_within_nodes_takes_the_same_steps_and_its_checkpoint_resumes_either_way(
    model_folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks(len(NODES), steps_within, model_folder, tmp_path)
    for found in results:
        assert found["node"]["steps"] == pytest.approx(found["all"]["steps"], rel=1e-4)
        assert found["node"]["weights"] == pytest.approx(found["all"]["weights"], rel=1e-5)
        assert found["all"]["share"] == pytest.approx(1 / 4, abs=0.1)
        assert found["node"]["share"] == pytest.approx(1 / 2, abs=0.1)
    assert results[0]["node"]["weights"]
    assert {file.name for file in (tmp_path / "node").glob("rank_*")} == {f"rank_{n}_of_2.safetensors" for n in (0, 1)}


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    assert ranks_by_node(NODES) == [[0, 2], [1, 3]]
    with pytest.raises(UserError, match="the nodes have 2, 1"):
        ranks_by_node(NODES[:3])


def published(rank: int, world_size: int, folder: Path, model: dict[str, Any], within: str) -> tuple[Any, Any, Any]:
    """This rank's rows of each weight: shape, first row and rows; the weights gathered on rank 0, and everywhere."""
    config = settings(trainer={"ranks": world_size, "shard_within": within}, **model)
    nodes = NODES[:world_size] if within == "node" else None
    made = Policy(config, folder, CPU, rank, world_size, nodes=nodes)
    held = {name: (each.shape, each.first, each.rows.to(made.dtype).tolist()) for name, each in made.shards().items()}
    whole, everywhere = made.weights(), made.weights(everywhere=True)
    assert everywhere is not None and {weight.dtype for weight in everywhere.values()} == {made.dtype}
    return held, *(each and {name: weight.tolist() for name, weight in each.items()} for each in (whole, everywhere))


def assert_together(results: list[tuple[Any, Any, Any]]) -> None:
    """The rows of all ranks are together the weights that a gathering of all finds."""
    whole = results[0][1]
    assert len(whole) > 10
    for number, (held, of_rank, everywhere) in enumerate(results):
        assert list(held) == list(whole), "every rank knows all names, in one order"
        assert everywhere == whole and of_rank == (whole if number == 0 else None)
    for name, expected in whole.items():
        rows = []
        for shape, first, of_rank in sorted((held[name] for held, *_ in results), key=lambda part: part[1]):
            assert shape == torch.tensor(expected).shape
            assert not of_rank or first == len(rows)
            rows += of_rank
        assert rows == expected, name


@pytest.mark.parametrize(
    ("world_size", "model"),
    [(1, {}), (2, {}), (3, {"dtype": "bfloat16"}), (2, {"lora": LoraConfig(rank=3)})],
    ids=str,
)
def test_the_rows_of_all_ranks_are_the_weights(
    model_folder: Path, ranks: Ranks, world_size: int, model: dict[str, Any]
) -> None:
    assert_together(ranks(world_size, published, model_folder, model, "all"))


def test_the_rows_of_experts_are_whole_weights_of_some_experts(tmp_path: Path, ranks: Ranks) -> None:
    results = ranks(4, published, saved("qwen3_moe", tmp_path), {}, "all")
    assert_together(results)
    of_first = [len(rows) for name, (_, _, rows) in results[0][0].items() if ".experts." in name]
    assert set(of_first) > {0} and sum(map(bool, of_first)) == len(of_first) / 3, "2 of 6 experts"


def test_where_nodes_hold_copies_the_ranks_of_one_copy_have_all(model_folder: Path, ranks: Ranks) -> None:
    results = ranks(4, published, model_folder, {}, "node")
    assert_together(results)
    assert [any(rows for _, _, rows in held.values()) for held, *_ in results] == [True, False, True, False]


def losses(
    rank: int, world_size: int, folder: Path, trainer: dict[str, Any], dtype: str, sharded: bool = False
) -> list[float]:
    """The losses of three steps."""
    config = settings(trainer=trainer, dtype=dtype)
    made = Policy(config, folder, CPU, rank, world_size, sharded=sharded)
    if made.sharded:
        assert all(isinstance(parameter, DTensor) for parameter in made.model.parameters())
        (master, *_), (parameter, *_) = made.master_weights.tensors.values(), made.master_weights.parameters.values()
        assert master.data_ptr() == local_shard(parameter).data_ptr() and master.dtype != torch.bfloat16
    learner = Learner(config, folder, CPU, rank, world_size, made)
    rows = made_rows(6, seed=80)
    batch = mini_batch([[[row for row in rows if row.trajectory % world_size == r]] for r in range(world_size)], 6)
    return [learner.step(batch).metrics["policy/policy_loss"] for _ in range(3)]


@pytest.mark.parametrize(
    ("world_size", "trainer", "dtype", "tolerance"),
    [
        (1, {"cpu_offload": True}, "float32", 1e-6),
        (1, {"gradient_checkpointing": True}, "float32", 1e-6),
        (1, {"gradient_checkpointing": 2}, "float32", 1e-6),
        (1, {"layout": "padded"}, "float32", 1e-6),
        (1, {}, "bfloat16", 0.02),
        (2, {"gradient_checkpointing": True}, "bfloat16", 0.02),
    ],
    ids=str,
)
def test_savers_of_memory_and_ranks_take_the_same_steps(
    model_folder: Path, ranks: Ranks, world_size: int, trainer: dict[str, Any], dtype: str, tolerance: float
) -> None:
    plain = losses(0, 1, model_folder, {}, "float32")
    given = (model_folder, trainer, dtype)
    found = [losses(0, 1, *given)] if world_size == 1 else ranks(world_size, losses, *given)
    assert found == [pytest.approx(plain, abs=tolerance)] * world_size


@pytest.mark.parametrize("trainer", [{}, {"cpu_offload": True}])
def test_one_rank_shards_on_request_and_takes_the_same_steps(
    model_folder: Path, ranks: Ranks, trainer: dict[str, Any]
) -> None:
    for dtype, tolerance in (("float64", 1e-9), ("bfloat16", 0.02)):
        found = ranks(1, losses, model_folder, trainer, dtype, True)
        assert found == [pytest.approx(losses(0, 1, model_folder, {}, "float64"), abs=tolerance)]


def of_rank(
    rank: int, world_size: int, folder: Path, ways: list[str], batches: list[MiniBatch]
) -> dict[str, list[Outcome]]:
    with pytest.MonkeyPatch.context() as patch:
        exact(patch)
        learners = {way: moved(configured(way), folder, batches[0], rank, world_size) for way in ways}
        return {way: [outcome(learner, batch) for batch in batches] for way, learner in learners.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_metrics_and_gradient_as_they_are(
    model_folder: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    exact(monkeypatch)
    rows, lonely = reference(), [[[]]] * (world_size - 1)
    whole = mini_batch([[rows]], TRAJECTORIES)
    batches = [batch_in(world_size, cut(rows)), mini_batch([[rows], *lonely], TRAJECTORIES)]
    ways = list(WAYS) if world_size == 2 else MERGED_WAYS[:4]
    results = ranks(world_size, of_rank, model_folder, ways, batches)
    for way in ways:
        expected = outcome(moved(configured(way), model_folder, whole), whole)
        for found in results:
            for ours in found[way]:
                assert_same(ours, expected, 1e-9)
