"""How much is computed again in the backward pass, and what compiled layers keep for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.estimates import configured as as_estimated
from benchmarks.estimates import model_folder as benchmark_folder
from service.config.learn import TrainerConfig
from service.learn.estimate import checkpointing
from service.learn.estimate.checkpointing import choose_checkpointing, kept_by_compiled_layer
from service.learn.estimate.fit import AMPLE_MARGIN, GPU_BYTES, fit, fit_on
from service.learn.estimate.step import StepEstimate, full_mini_batch
from service.learn.learner import Learner
from service.learn.model.policy import Policy
from service.learn.model.policy_model import Checkpointing
from service.learn.settings import LearnSettings
from service.types import MiniBatch
from tests.pure.learn.builders import CPU, fitting, made_rows, mini_batch, settings
from tests.pure.learn.ranks import Ranks
from tests.pure.learn.test_estimate import ROW_TOKENS, SHAPES, configured, folder_of

LAYERS = SHAPES["dense"]["num_hidden_layers"]
LEAST, AS_WRITTEN, COMPILED, WITHOUT_ELEMENTWISE = 100, 10, 7, 5
"""Bytes of a step with all layers checkpointed; what each layer keeps beyond that."""


@pytest.mark.parametrize(
    ("room", "compiled", "chosen"),
    [
        (LEAST + LAYERS * COMPILED, True, Checkpointing(0)),
        (LEAST + LAYERS * COMPILED - 1, True, Checkpointing(0, elementwise=True)),
        (LEAST + LAYERS * WITHOUT_ELEMENTWISE - 1, True, Checkpointing(1, elementwise=True)),
        (LEAST + WITHOUT_ELEMENTWISE, True, Checkpointing(LAYERS - 1, elementwise=True)),
        (LEAST, True, Checkpointing(LAYERS)),
        (LEAST - 1, True, Checkpointing(LAYERS)),
        (LEAST + LAYERS * AS_WRITTEN, False, Checkpointing(0)),
        (LEAST + LAYERS * AS_WRITTEN - 1, False, Checkpointing(1)),
        (LEAST + LAYERS * AS_WRITTEN // 2, False, Checkpointing(LAYERS // 2)),
        (0, False, Checkpointing(LAYERS)),
    ],
)
def test_as_little_is_computed_again_as_the_memory_allows(
    room: int, compiled: bool, chosen: Checkpointing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_steps(monkeypatch, again=0.25)
    folder = folder_of("dense", tmp_path)
    found, estimated = choose_checkpointing(configured("dense", 1), folder, lambda _: (room, room), compiled)
    assert found == chosen
    assert estimated.peak_bytes <= max(room, LEAST)


def pretend_steps(monkeypatch: pytest.MonkeyPatch, again: float) -> None:
    """Estimates with the bytes above, of which a share of the time is computing all layers again."""

    def step(*_: Any, checkpointing: Checkpointing) -> StepEstimate:
        held = LEAST + (LAYERS - checkpointing.layers) * AS_WRITTEN
        return StepEstimate(
            1, 1, {"activations": held}, 1.0, 1 - again, 0.0, {"elementwise": 0.0, "products": 1.0}, 0.0
        )

    kept: Callable[..., float] = lambda *given: WITHOUT_ELEMENTWISE if given[2] else COMPILED  # noqa: E731
    monkeypatch.setattr(checkpointing, "estimate_step", step)
    monkeypatch.setattr(checkpointing, "kept_by_compiled_layer", kept)


COSTS_LITTLE, COSTS_MUCH = 0.0299 * LAYERS / (1 + 0.0299 * LAYERS), 0.25
"""Share of the time after which one layer more costs just less than 3 % of the fastest step, and much more."""


@pytest.mark.parametrize(
    ("ample", "again", "compiled", "chosen"),
    [
        (LEAST + LAYERS * COMPILED, COSTS_MUCH, True, Checkpointing(0)),
        (LEAST + LAYERS * COMPILED - 1, COSTS_MUCH, True, Checkpointing(0, elementwise=True)),
        (LEAST + LAYERS * WITHOUT_ELEMENTWISE - 1, COSTS_LITTLE, True, Checkpointing(1, elementwise=True)),
        (LEAST + LAYERS * WITHOUT_ELEMENTWISE - 1, COSTS_MUCH, True, Checkpointing(0)),
        (LEAST + (LAYERS - 1) * AS_WRITTEN, COSTS_LITTLE, False, Checkpointing(1)),
        (LEAST + (LAYERS - 1) * AS_WRITTEN, COSTS_MUCH, False, Checkpointing(0)),
        (LEAST + (LAYERS - 2) * AS_WRITTEN, COSTS_LITTLE, False, Checkpointing(0)),
    ],
)
def test_more_is_computed_again_where_it_costs_three_percent_of_the_time_at_most_and_leaves_ample_memory(
    ample: int, again: float, compiled: bool, chosen: Checkpointing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_steps(monkeypatch, again)
    usable = LEAST + LAYERS * (COMPILED if compiled else AS_WRITTEN)
    room = lambda _: (usable, ample)  # noqa: E731
    found, _ = choose_checkpointing(configured("dense", 1), folder_of("dense", tmp_path), room, compiled)
    assert found == chosen


@pytest.mark.parametrize(("ranks", "setting"), [(1, "auto"), (2, "auto"), (2, True), (2, False)])
def test_gathered_weights_are_kept_for_the_backward_pass_where_there_is_ample_memory(
    ranks: int, setting: bool | str, tmp_path: Path
) -> None:
    config = configured("dense", ranks, reshard_after_forward=setting, gradient_checkpointing=False)
    found, folder = fitting(config), folder_of("dense", tmp_path)
    weights = 2 * fit(found, folder, GPU_BYTES["H100"]).step.parameters
    least = fit(found, folder, 1.0).step.peak_bytes
    for n_bytes, ample in ((least + weights - 1, False), (least + weights, True)):
        chosen = fit(found, folder, n_bytes / (1 - AMPLE_MARGIN) * (1 + 1e-9))
        kept = setting is False or (setting == "auto" and ranks > 1 and ample)
        assert chosen.checkpointing.regather is not kept
        assert chosen.step.peak_bytes == least + weights * (kept and setting == "auto")
        assert ("gathered weights are kept" in " ".join(chosen.lines())) is kept


@pytest.mark.parametrize(
    ("setting", "layers", "chosen"),
    [
        ("auto", 6, []),
        (False, 6, []),
        (True, 3, [0, 1, 2]),
        (2, 4, [0, 2]),
        (3, 7, [0, 3, 5]),
        (9, 4, [0]),
    ],
)
def test_a_setting_is_a_number_of_layers_that_are_spread_evenly(
    setting: bool | int | str, layers: int, chosen: list[int]
) -> None:
    of_setting = Checkpointing.of(TrainerConfig(gradient_checkpointing=setting), layers)
    assert [number for number in range(layers) if of_setting.includes(number, layers)] == chosen
    assert of_setting.layers == len(chosen)


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("elementwise", [False, True])
def test_a_compiled_layer_keeps_the_bytes_that_are_estimated(
    elementwise: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = folder_of("dense", tmp_path), configured("dense", 1, compile=True)
    model = config.model.model_copy(update={"dtype": "bfloat16"})
    config = replace(config, longest_row=ROW_TOKENS, model=model)
    torch._dynamo.reset()
    original = nn.Module.compile
    compiled_as_for_a_gpu = {"backend": "aot_eager_decomp_partition", "dynamic": True}
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: original(module, **compiled_as_for_a_gpu))
    # the policy changes this setting, which other tests of this process must not keep
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        assert_kept_as_estimated(config, folder, elementwise)


def assert_kept_as_estimated(config: LearnSettings, folder: Path, elementwise: bool) -> None:
    """The first layer, called with the inputs of a forward pass, keeps the estimated bytes for its backward pass."""
    policy = Policy(config, folder, CPU, 0, 1, random_weights=True, checkpointing=Checkpointing(0, elementwise))
    policy._device_settings = policy._device_settings._replace(variable_length=True)
    micro = full_mini_batch(config.trainer, SHAPES["dense"]["vocab_size"], config.longest_row).ranks[0][0]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    class Stop(Exception):
        pass

    layer, called = policy.model.layers[0], policy.model.layers[0]._compiled_call_impl

    def first_layer(*arguments: Any, **named: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            called(*arguments, **named)
        given = [*arguments, *named["position_embeddings"], named["packing"].cu_seqlens, *layer.parameters()]
        for tensor in given:
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        raise Stop

    layer._compiled_call_impl = first_layer
    with suppress(Stop):
        policy.model(policy.to_device(micro))
    assert sum(kept.values()) == pytest.approx(kept_by_compiled_layer(config, folder, elementwise), rel=0.02)


@pytest.mark.full
def test_at_16k_tokens_a_model_of_1_7_billion_parameters_computes_nothing_again(tmp_path: Path) -> None:
    found = fit(as_estimated(4, 2048), benchmark_folder("Qwen3-1.7B", tmp_path), GPU_BYTES["H100"])
    print(*found.lines(), sep="\n")
    assert found.checkpointing == Checkpointing(0, regather=False)
    assert found.problem() is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "most_layers"), [("Qwen3-0.6B", 0), ("Qwen3-4B", 1), ("Qwen3-8B", 27), ("Qwen3-14B", 40)]
)
def test_larger_models_compute_more_again(name: str, most_layers: int, tmp_path: Path) -> None:
    ranks = 8 if name == "Qwen3-14B" else 4
    found = fit(as_estimated(ranks, 2048), benchmark_folder(name, tmp_path), GPU_BYTES["H100"])
    print(name, *found.lines(), sep="\n")
    assert found.checkpointing.layers <= most_layers
    assert found.problem() is None


@pytest.mark.parametrize("compiled", [False, True])
def test_a_lack_of_memory_leads_to_half_of_the_layers_then_to_all_and_then_to_no_more(compiled: bool) -> None:
    ladder = [Checkpointing(1, regather=False)]
    while (lighter := ladder[-1].lighter(5, compiled)) is not None:
        ladder.append(lighter)
    assert ladder[1:] == [Checkpointing(3, elementwise=compiled), Checkpointing(5)]
    assert Checkpointing(3).lighter(5, compiled) == Checkpointing(5)
    assert Checkpointing(5, regather=False).lighter(5, compiled) == Checkpointing(5)


def agreed(rank: int, _: int, asked: list[Checkpointing]) -> Checkpointing:
    return asked[rank].of_all_ranks()


def test_ranks_on_unlike_gpus_checkpoint_and_gather_the_same_layers(ranks: Ranks) -> None:
    asked = [Checkpointing(3, regather=False), Checkpointing(1, elementwise=True), Checkpointing(0, regather=False)]
    assert ranks(3, agreed, asked) == [Checkpointing(3, elementwise=True)] * 3
    assert ranks(2, agreed, asked[::2]) == [Checkpointing(3, regather=False)] * 2


def test_on_a_cpu_and_for_float32_nothing_is_estimated_and_a_number_holds_as_it_is(tmp_path: Path) -> None:
    config = fitting(configured("dense", 1))
    assert config.learn.model.dtype == "float32" and config.learn.trainer.gradient_checkpointing == "auto"
    gpu = torch.device("cuda", 0)
    assert fit_on(CPU, config, tmp_path) is fit_on(gpu, config, tmp_path) is None
    bf16 = fitting(configured("dense", 2, gradient_checkpointing=3, accelerator="H100"))
    assert fit_on(CPU, bf16, tmp_path) is None
    found = fit_on(gpu, bf16, folder_of("dense", tmp_path))
    assert found is not None and found.checkpointing.layers == -(-LAYERS // 3)


def gradient_norm_after_an_estimate(rank: int, world_size: int, folder: Path, shape_folder: Path) -> float:
    """The gradient norm of a step of ranks that first chose as an estimate says, as the ranks of a GPU run do."""
    dist.destroy_process_group()
    fit(fitting(configured("dense", world_size, gradient_checkpointing="auto")), shape_folder, GPU_BYTES["H100"])
    store = f"file://{shape_folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    return Learner(settings(), folder, CPU, rank, world_size).step(two_ranks()).metrics["policy/grad_norm"]


def gradient_norm(rank: int, world_size: int, folder: Path) -> float:
    return Learner(settings(), folder, CPU, rank, world_size).step(two_ranks()).metrics["policy/grad_norm"]


def two_ranks() -> MiniBatch:
    return mini_batch([[made_rows(2, seed=0)], [made_rows(2, seed=1)]], trajectories=2)


@pytest.mark.full
def test_ranks_train_together_after_each_has_estimated_with_pretended_ones(
    model_folder: Path, ranks: Ranks, tmp_path: Path
) -> None:
    expected = ranks(2, gradient_norm, model_folder)
    assert ranks(2, gradient_norm_after_an_estimate, model_folder, folder_of("dense", tmp_path)) == expected
