"""The model families that are trained: same log-probabilities as their own code, same files on the way out."""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.handoff.batches.pack import prefix_order
from service.learn import device_batch
from service.learn.device_batch import DeviceBatch, DeviceSettings, Layout
from service.learn.learner import Learner
from service.learn.model.router_replay import routing_of_model
from service.types import MicroBatch
from tests.pure.learn.builders import CPU, made_rows, micro_batch, mini_batch, settings
from tests.pure.learn.families import FAMILIES, replayed, saved
from tests.pure.learn.trees import tree_rows


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def logprobs(folder: Path, micro: MicroBatch, **trainer: Any) -> torch.Tensor:
    learner = Learner(settings(trainer=trainer), folder, CPU, 0, 1)
    layout = trainer.get("layout", "packed")
    return learner.policy.model(DeviceBatch.of(micro, DeviceSettings(CPU, torch.float32, layout=layout)))[0].detach()


def test_dropout_that_a_model_s_configuration_asks_for_is_left_out(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path)
    micro = micro_batch(made_rows(5, seed=60))
    plain = logprobs(folder, micro)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_dropout": 0.5}))
    for layout in ("packed", "padded"):
        torch.testing.assert_close(logprobs(folder, micro, layout=layout), plain, atol=1e-5, rtol=1e-5)


def choices(mixture: Path, micro: MicroBatch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The experts that computed each token, for each layer that has experts (the second of three has none), and the
    log-probabilities."""
    chosen: list[torch.Tensor] = []
    model = Learner(settings(), mixture, CPU, 0, 1).policy.model
    for layer in (0, 2):
        model.layers[layer].mlp.experts.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1]))
    return chosen, model(DeviceBatch.of(micro, DeviceSettings(CPU, torch.float32)))[0].detach()


@pytest.mark.parametrize(("layers", "kind"), [(3, np.uint8), (2, np.int16)])
def test_recorded_experts_are_the_ones_that_compute_and_stay_as_small_on_the_device(
    mixture: Path, layers: int, kind: type[np.integer[Any]]
) -> None:
    """Per layer of the model, or per layer with experts."""
    there = replayed(micro_batch(made_rows(3, seed=63)), layers, natively=0.3)
    assert there.routed_experts_N is not None
    recorded_as = replace(there, routed_experts_N=there.routed_experts_N.astype(kind))
    on_device = DeviceBatch.of(recorded_as, DeviceSettings(CPU, torch.float32)).routed_experts_SLK
    assert on_device is not None and on_device.nbytes == layers * 2 * kind().nbytes * len(there.token_ids_N)
    for position, seen in enumerate(choices(mixture, recorded_as)[0]):
        recorded = there.routed_experts_N[:, position * (2 if layers == 3 else 1)]
        known = (recorded >= 0).all(-1)
        assert np.array_equal(seen.numpy()[known], recorded[known])
        assert (seen.numpy() >= 0).all()


@pytest.mark.parametrize(
    ("name", "layers"), [("qwen3_moe", (3, 2)), ("qwen2_moe", (3, 3)), ("qwen3", ())], ids=lambda value: str(value)
)
def test_what_can_be_replayed_is_known_from_the_configuration(name: str, layers: tuple[int, ...]) -> None:
    found = routing_of_model(FAMILIES[name])
    assert found == ((layers, 2, 6) if layers else ((), 0, 0))


@pytest.mark.parametrize("layout", ["packed", "padded", "shared_prefix"])
def test_replaying_the_native_choice_or_none_changes_nothing(mixture: Path, layout: str) -> None:
    micro = micro_batch(made_rows(3, seed=64))
    chosen, plain = choices(mixture, micro)
    native = replace(micro, routed_experts_N=torch.stack(chosen, 1).numpy().astype(np.int16))
    for replaying in (native, replayed(micro, 3, natively=1.0)):
        torch.testing.assert_close(logprobs(mixture, replaying, layout=layout), plain, atol=1e-5, rtol=1e-5)


def test_only_tokens_with_the_same_recorded_experts_are_shared(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_batch, "prefix_order", partial(prefix_order, least=1, fraction=0))
    rows = tree_rows(5, trajectories=6, most=30)
    micro = micro_batch(rows)
    experts = replayed(micro, 3, natively=0.0).routed_experts_N
    assert experts is not None
    experts[:] = experts[micro.token_ids_N]  # the same for the same token
    alike = replace(micro, routed_experts_N=experts)
    other = replace(micro, routed_experts_N=experts.copy())
    for start, stop in pairwise(micro.offsets_R.tolist()):
        experts_of_row = other.routed_experts_N[(start + stop) // 2 : stop]  # type: ignore[index]
        experts_of_row[:] = np.roll(experts_of_row, start % 3, axis=2)
    slots = [Layout.of("shared_prefix", it, CPU).shape[1] for it in (alike, other)]
    assert slots[0] == Layout.of("shared_prefix", micro, CPU).shape[1] < slots[1] < len(micro.token_ids_N)
    for it in (alike, other):
        expected = logprobs(mixture, it)
        torch.testing.assert_close(logprobs(mixture, it, layout="shared_prefix"), expected, atol=1e-5, rtol=1e-5)


def test_replay_gives_the_router_a_gradient_and_survives_recomputation(mixture: Path) -> None:
    batch = mini_batch([[made_rows(4, seed=65)]], trajectories=4)
    batch = replace(batch, ranks=((replayed(batch.ranks[0][0], 3, natively=0.2),),))
    gradients = []
    for checkpointing in (False, True):
        learner = Learner(settings(trainer={"gradient_checkpointing": checkpointing}), mixture, CPU, 0, 1)
        learner.accumulate(batch)
        gradients.append(learner.policy.model.layers[0].mlp.gate.weight.grad)
    assert gradients[0].norm() > 0
    torch.testing.assert_close(gradients[0], gradients[1])


def test_routing_of_another_number_of_layers_is_refused(mixture: Path) -> None:
    with pytest.raises(ValueError, match="routed experts of 5 layers"):
        logprobs(mixture, replayed(micro_batch(made_rows(2, seed=66)), 5, natively=0.0))
