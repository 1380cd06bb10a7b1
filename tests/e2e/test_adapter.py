"""An engine with an adapter against a Hugging Face forward pass of the merged weights, also amid publications."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import save
from transformers import PreTrainedModel

from actors.weights.policy_tensors import AdapterShapes, checksum_of
from service.config import Config, LoraConfig, ModelConfig
from service.errors import RunFailed
from service.learn.model.adapter_folder import peft_names
from service.learn.model.hf_checkpoint import Names
from service.learn.model.policy_model import trained_shapes
from service.rollout.engine import Sampling
from service.types import PolicyVersion
from tests.e2e.test_engine import (
    CONFIG,
    WORKERS,
    Observed,
    dense,
    difference,
    of_workers,
    prompt,
    serving,
)

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=6, alpha=12)
"""Of a rank for which no slot is made."""
CONFIG_OF_ADAPTERS: Config = CONFIG.model_copy(update={"model": ModelConfig(dtype="float32", lora=LORA)})
BAR = 1e-3
"""Nats by which a log-probability may differ."""
LONG = Sampling(max_tokens=250)

Adapter = dict[str, torch.Tensor]


def base() -> PreTrainedModel:
    return dense(0)


def shapes() -> AdapterShapes:
    return peft_names(trained_shapes(base().config, LORA), Names())


def adapter(seed: int) -> Adapter:
    """One that changes log-probabilities by tenths."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * (0.05 if "lora_B" in name else shape[1] ** -0.5)
        for name, shape in shapes().items()
    }


def merged(tensors: Adapter) -> PreTrainedModel:
    model = base()
    with torch.no_grad():
        for name, a in tensors.items():
            if "lora_A" in name:
                weight = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
                b = tensors[name.replace("lora_A", "lora_B")]
                model.get_parameter(weight).add_(LORA.alpha / LORA.rank * b @ a)
    return model


def sent(tensors: Adapter) -> tuple[np.ndarray, int]:
    data = save(tensors)
    return np.frombuffer(data, np.uint8), checksum_of(data)


class Unchecked(Observed):
    """Gives its worker adapters that the engine would refuse."""

    async def load_unknown(self, shapes: AdapterShapes) -> list[str]:
        return await self._running().collective_rpc(
            "start_adapter", kwargs={"shapes": shapes, "rank": 6, "alpha": 12.0}
        )

    async def publish_unchecked(self, version: PolicyVersion, tensors: Adapter) -> None:
        """Update to an adapter of any shapes, which the check before the pause would refuse."""
        size, any_shapes = self._size, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        elements = sum(tensor.numel() for tensor in tensors.values())
        self._size = size._replace(elements=elements, adapter=any_shapes)
        try:
            await self.update_weights(version, *sent(tensors))
        finally:
            self._size = size


@pytest.fixture(scope="module", params=WORKERS)
def engine(request: pytest.FixtureRequest, local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serves `base()` as version 1.0 to begin with."""
    config = of_workers(CONFIG_OF_ADAPTERS, request.param)
    with serving(tmp_path_factory.mktemp("base"), base(), config, Unchecked) as engine:
        yield engine


def publish(engine: Any, step: int, tensors: Adapter) -> Any:
    return ray.get(engine.update_weights.remote(PolicyVersion(1, step), *sent(tensors)))


def serves(engine: Any, step: int, model: PreTrainedModel) -> None:
    generation = ray.get(engine.generate.remote(prompt(step), Sampling(max_tokens=40), "r"))
    assert difference(model, prompt(step), generation, 1.0) < BAR
    assert set(generation.versions.tolist()) == {PolicyVersion(1, step).pack()}


def test_before_the_first_publication_the_policy_is_the_model(engine: Any) -> None:
    serves(engine, 0, base())


def expected(model: PreTrainedModel, responses: list[np.ndarray]) -> list[np.ndarray]:
    """[T] log-probabilities that the model gives the responses to prompt 0, prompt 1, ..., in one forward pass."""
    rows = [torch.from_numpy(np.concatenate([prompt(i), ids])).long() for i, ids in enumerate(responses)]
    token_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.inference_mode():
        logprob = model(token_ids[:, :-1]).logits.log_softmax(-1).gather(2, token_ids[:, 1:, None])[..., 0]
    return [
        logprob[i, len(row) - len(ids) - 1 : len(row) - 1].numpy()
        for i, (row, ids) in enumerate(zip(rows, responses, strict=True))
    ]


@pytest.mark.parametrize("publications", [3, pytest.param(20, marks=pytest.mark.full)])
def test_each_token_has_the_version_and_the_log_probability_of_the_adapter_that_sampled_it(
    engine: Any, publications: int
) -> None:
    first = 10 * publications
    publish(engine, first - 1, adapter(first - 1))
    crossed, models = 0, [merged(adapter(step)) for step in range(first - 1, first + publications)]
    for step, (old_model, new_model) in enumerate(pairwise(models), first):
        requests = [engine.generate.remote(prompt(i), LONG, f"r{i}") for i in range(16)]
        ray.wait(requests, num_returns=1, timeout=0.15)
        publish(engine, step, adapter(step))
        generations = ray.get(requests)
        old, new = PolicyVersion(1, step - 1).pack(), PolicyVersion(1, step).pack()
        of_old, of_new = (expected(model, [g.token_ids for g in generations]) for model in (old_model, new_model))
        for i, generation in enumerate(generations):
            before = int((generation.versions == old).sum())
            assert generation.versions.tolist() == [old] * before + [new] * (len(generation.versions) - before)
            of_both = np.concatenate([of_old[i][:before], of_new[i][before:]])
            assert np.abs(of_both - generation.logprobs).max() < BAR
            crossed += 0 < before < len(generation.versions)
    assert crossed >= publications // 3


def test_layers_that_the_model_lacks_are_refused_by_the_worker_and_the_old_adapter_goes_on(engine: Any) -> None:
    """vLLM itself would ignore them."""
    publish(engine, 254, adapter(254))
    layer = "base_model.model.model.layers.7.mlp.up_proj"
    of_other_layers = {f"{layer}.lora_A.weight": (6, 3), f"{layer}.lora_B.weight": (4, 6)}
    for reason in ray.get(engine.load_unknown.remote(of_other_layers)):
        assert "no layer with an adapter at model.layers.7.mlp.up_proj" in reason
    serves(engine, 254, merged(adapter(254)))


def test_an_adapter_that_vllm_fails_to_activate_fails_the_update_and_no_token_is_sampled_before_the_next_one(
    engine: Any,
) -> None:
    """vLLM fails after the old adapter was taken out of its slot."""
    publish(engine, 255, adapter(255))
    beyond_the_slot = LORA.slot_rank + 1
    wide = {
        name: torch.zeros((beyond_the_slot, n) if "lora_A" in name else (m, beyond_the_slot))
        for name, (m, n) in shapes().items()
    }
    with pytest.raises(RunFailed, match=r"version 1:256 were not loaded in 2 tries"):
        ray.get(engine.publish_unchecked.remote(PolicyVersion(1, 256), wide))
    request = engine.generate.remote(prompt(257), Sampling(max_tokens=40), "r")
    assert ray.wait([request], timeout=0.5)[0] == [], "the engine stays paused"
    publish(engine, 257, adapter(257))
    generation = ray.get(request)
    assert difference(merged(adapter(257)), prompt(257), generation, 1.0) < BAR
    assert set(generation.versions.tolist()) == {PolicyVersion(1, 257).pack()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_runs_of_rows_get_their_own_adapter_and_rows_without_one_none() -> None:
    from actors.engine.cpu_lora import RunsOfRows, runs_of

    slots = torch.tensor([1, 1, -1, 0, 0, 0, -1, -1, 1])
    assert runs_of(slots) == [(0, 2, 1), (3, 6, 0), (8, 9, 1)]
    assert runs_of(torch.full((3,), -1)) == []
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(9, width, generator=generator, dtype=torch.float64) for width in (5, 7))
    a = [torch.randn(2, 1, 3, 5, generator=generator, dtype=torch.float64) for _ in range(2)]
    b = [torch.randn(2, 1, width, 3, generator=generator, dtype=torch.float64) for width in (4, 3)]
    expected = y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[row] += 0.5 * torch.cat([b[part][slot, 0] @ (a[part][slot, 0] @ x[row]) for part in range(2)])
    arithmetic = RunsOfRows.__new__(RunsOfRows)
    arithmetic._runs = runs_of(slots)
    arithmetic.add_lora_linear(y, x, a, b, 0.5, (4, 3))
    torch.testing.assert_close(y, expected)
