"""Small random models of several families in vLLM: `python -m tests.families.engine gemma3 olmo3`.

Printed are differences in nats of the same sampled tokens' log-probabilities, by engine, trainer and transformers.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from benchmarks.gpu.small_engine import by_row, sampled, settings
from service.errors import RunFailed, UserError
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.rollout.engine import Sampling
from service.types import Float64s
from tests.families.small import small_config

FAMILIES = ("gemma3", "glm4_moe", "gpt_oss", "olmo3", "qwen3_5", "qwen3_5_moe", "smollm3")
SIZES = {"vocab_size": 512, "hidden_size": 128, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
SIZES |= {"intermediate_size": 256, "moe_intermediate_size": 64}
SIZES |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Sizes that vLLM's kernels for CPUs support: heads of 32, in linear attention of 128."""
VISION = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 128}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
LENGTHS = (5, 40, 70, 33, 100, 64, 17, 90)
"""Lengths of the prompts, in tokens."""
SAMPLING = Sampling(max_tokens=40, temperature=0.9)


def main() -> None:
    """Print one line of JSON for each family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), choices=("float32", "bfloat16"))
    parser.add_argument("--multimodal", action="store_true", help="in folders that have a model for images, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # on busy cores several threads would wait for each other
    for family in arguments.families:
        found = agreement(family, arguments.dtypes, arguments.multimodal)
        print(json.dumps({"family": family} | found), flush=True)


def agreement(family: str, dtypes: tuple[str, ...], multimodal: bool) -> dict[str, Any]:
    """The mean and the largest difference of each pair, in nats, and the mean log-probability. In bfloat16 one pair is
    transformers' own bfloat16 and float32."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        small_model(family, 0, multimodal).save_pretrained(name)
        for dtype in dtypes:
            try:
                pairs, mean = compared(dtype, Path(name))
            except (RunFailed, UserError) as error:
                found[dtype] = str(error)
                continue
            nats = {pair: (np.abs(difference).mean(), np.abs(difference).max()) for pair, difference in pairs.items()}
            found[dtype] = {pair: [float(f"{x:.2g}") for x in both] for pair, both in nats.items()} | {"mean": mean}
    return found


def compared(dtype: str, folder: Path) -> tuple[dict[str, Float64s], float]:
    """Differences in nats for each sampled token, and the mean of the engine's log-probabilities."""
    rng, config = np.random.default_rng(0), settings(dtype)
    prompts = [rng.integers(3, 500, length).astype(np.int32) for length in LENGTHS]
    generator = config.generator.model_copy(update={"kv_cache_bytes": None, "concurrent_groups": 1})
    config = config.model_copy(update={"generator": generator})
    batch, of_engine = asyncio.run(sampled(config, folder, prompts, SAMPLING))
    policy = Policy(LearnSettings.of(config), folder, torch.device("cpu"), 0, 1)
    of_trainer = policy.logprobs([policy.to_device(batch)])[0].double().numpy()
    kind = of_kind(AutoConfig.from_pretrained(folder))
    exact, rounded = (by_row(kind.from_pretrained(folder, dtype=each), batch) for each in ("float32", dtype))
    pairs = {"engine_trainer": of_engine - of_trainer, "engine_float32": of_engine - exact}
    if dtype == "bfloat16":
        pairs["transformers_float32"] = rounded - exact
    return pairs, round(float(of_engine.mean()), 2)


def small_model(family: str, seed: int = 0, multimodal: bool = False) -> PreTrainedModel:
    """Random weights in shapes that vLLM's kernels for CPUs support, with linear attention in three of four layers if
    the family has it; `multimodal`: with a small image model."""
    torch.manual_seed(seed)
    config = small_config(family)
    for name, size in SIZES.items():
        if getattr(config, name, None) is not None or name == "head_dim":
            setattr(config, name, size)
    if hasattr(config, "linear_num_key_heads"):
        config.layer_types = ["linear_attention"] * 3 + ["full_attention"]
    config.initializer_range = 0.08
    config.num_hidden_layers = len(getattr(config, "layer_types", None) or ()) or config.num_hidden_layers
    if multimodal:
        config = type(AutoConfig.for_model(family))(text_config=config.to_dict(), vision_config=VISION)
    return of_kind(config).from_config(config, dtype=torch.float32).eval()  # type: ignore[no-any-return]


def of_kind(config: PretrainedConfig) -> Any:
    """The class of transformers that has all weights of the model."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


if __name__ == "__main__":
    main()
