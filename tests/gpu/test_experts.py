"""Routed experts as vLLM records them on a GPU, where its Model Runner V2 and asynchronous scheduling run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from transformers import Qwen3MoeForCausalLM

from service.config import Config, GeneratorConfig
from service.rollout.engine import Sampling
from service.types import PolicyVersion

# The engine needs Ray, without which a machine skips this file.
pytest.importorskip("ray")
pytest.importorskip("vllm")
from actors.engine.vllm_engine import VllmEngine, engine_env
from tests.e2e.test_engine import mixture, prompt, weights_of
from tests.pure.actors.fakes import at, image_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MAX_DIFFER = 0.02
"""Fraction of choices in which bfloat16 may turn a close decision of a router."""


def chosen(model: Qwen3MoeForCausalLM, token_ids: np.ndarray) -> np.ndarray:
    """[T, layers, k] the experts that the model itself chooses, in ascending order."""
    with torch.no_grad():
        routed = model(torch.from_numpy(token_ids.astype(np.int64))[None].cuda(), output_router_logits=True)
    topk = model.config.num_experts_per_tok
    return np.stack([logits.topk(topk).indices.sort().values.cpu().numpy() for logits in routed.router_logits], 1)


@pytest.mark.timeout(400)
async def test_recorded_experts_are_those_of_the_weights_that_computed_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(generator=GeneratorConfig(max_input_length=64, max_generate_length=256, gpu_memory_utilization=0.3))
    for name, value in engine_env(config.generator).items():
        monkeypatch.setenv(name, value)
    models = [mixture(seed).to(torch.bfloat16).cuda() for seed in range(2)]
    models[0].save_pretrained(tmp_path)
    engine = VllmEngine(config, tmp_path)
    await engine.start(PolicyVersion(0, 0))
    try:
        for step, model in enumerate(models):
            if step:
                weights = {name: weight.cpu() for name, weight in weights_of(model).items()}
                version, data = PolicyVersion(0, step), save(weights)
                image = image_of(data, version.pack())
                await engine.update_weights(version, at(image.path, len(data)), 0)
                image.close()
            turn = await engine.generate(prompt(step), Sampling(max_tokens=100), f"turn {step}")
            assert turn.routed_experts is not None
            token_ids = np.concatenate([prompt(step), turn.token_ids])[:-1]
            recorded = np.sort(turn.routed_experts, axis=2)
            assert recorded.shape == (len(token_ids), 2, 2)
            assert (recorded != chosen(model, token_ids)).mean() < MAX_DIFFER
    finally:
        engine.stop()
