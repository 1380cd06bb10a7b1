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
from service.learn.estimate import checkpointing
from service.learn.estimate.checkpointing import choose_checkpointing, kept_by_compiled_layer
from service.learn.estimate.fit import GPU_BYTES, checkpointing_on, fit
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
    def step(*_: Any, checkpointing: Checkpointing) -> StepEstimate:
        held = LEAST + (LAYERS - checkpointing.layers) * AS_WRITTEN
        return StepEstimate(1, 1, {"activations": held}, 0.0, 0.0, 0.0, {}, 0.0)

    kept: Callable[..., float] = lambda *given: WITHOUT_ELEMENTWISE if given[2] else COMPILED  # noqa: E731
    monkeypatch.setattr(checkpointing, "estimate_step", step)
    monkeypatch.setattr(checkpointing, "kept_by_compiled_layer", kept)
    folder = folder_of("dense", tmp_path)
    found, estimated = choose_checkpointing(configured("dense", 1), folder, lambda _: room, compiled)
    assert found == chosen
    assert estimated.peak_bytes <= max(room, LEAST)


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
    of_setting = Checkpointing.of(setting, layers)
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
    assert found.checkpointing == Checkpointing(0)
    assert found.problem() is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "most_layers"), [("Qwen3-0.6B", 0), ("Qwen3-4B", 0), ("Qwen3-8B", 27), ("Qwen3-14B", 40)]
)
def test_larger_models_compute_more_again(name: str, most_layers: int, tmp_path: Path) -> None:
    ranks = 8 if name == "Qwen3-14B" else 4
    found = fit(as_estimated(ranks, 2048), benchmark_folder(name, tmp_path), GPU_BYTES["H100"])
    print(name, *found.lines(), sep="\n")
    assert found.checkpointing.layers <= most_layers
    assert found.problem() is None


def test_on_a_cpu_and_for_float32_nothing_is_estimated_and_a_number_holds_as_it_is(tmp_path: Path) -> None:
    config = fitting(configured("dense", 1))
    assert config.learn.model.dtype == "float32" and config.learn.trainer.gradient_checkpointing == "auto"
    gpu = torch.device("cuda", 0)
    assert checkpointing_on(CPU, config, tmp_path) is checkpointing_on(gpu, config, tmp_path) is None
    bf16 = fitting(configured("dense", 2, gradient_checkpointing=3))
    assert checkpointing_on(gpu, bf16, tmp_path) is None


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
