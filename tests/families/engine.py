"""Small random models of several families: `python -m tests.families.engine agreement gemma3 olmo3`.

agreement    differences in nats of the same sampled tokens' log-probabilities, by engine, trainer and transformers
model        writes a model in place of the Qwen3 that a recipe makes: `... model gemma3 --folder FOLDER`, and then
             `baton run --config configs/quickstart.yaml model.make=null model.path=FOLDER`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from itertools import pairwise
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

from benchmarks.gpu.small_engine import sampled, settings
from service.config import load
from service.errors import RunFailed, UserError
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.rollout.chat.tokenizer import load_tokenizer
from service.rollout.engine import Sampling
from service.run.preparing.inputs import make_policy
from service.types import Float64s, MicroBatch
from tests.families.small import small_config

FAMILIES = ("gemma3", "glm4_moe", "gpt_oss", "olmo3", "qwen3_5", "qwen3_5_moe", "smollm3")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 16,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Sizes that vLLM's kernels for CPUs support: heads of 32, in linear attention of 128."""
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
RECIPE = Path("configs/quickstart.yaml")
LENGTHS = (5, 40, 70, 33, 100, 64, 17, 90)
"""Lengths of the prompts, in tokens."""
SAMPLING = Sampling(max_tokens=40, temperature=0.9)
Pairs = dict[str, Float64s]


def main() -> None:
    """Print one line of JSON for each family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("agreement", "model"))
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"), choices=("float32", "bfloat16"))
    parser.add_argument("--multimodal", action="store_true", help="in folders that have a model for images, too")
    parser.add_argument("--folder", type=Path, help="of the model that is written")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="whose tokenizer it gets (default: %(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # on busy cores several threads would wait for each other
    for family in arguments.families:
        if arguments.what == "model":
            found: dict[str, Any] = {"folder": str(for_recipe(family, arguments.folder, arguments.recipe))}
        else:
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


def compared(dtype: str, folder: Path) -> tuple[Pairs, float]:
    """Differences in nats for each sampled token, and the mean of the engine's log-probabilities."""
    batch, of_engine = asyncio.run(turns_of(dtype, folder))
    policy = Policy(LearnSettings.of(settings(dtype)), folder, torch.device("cpu"), 0, 1)  # type: ignore[arg-type]
    of_trainer = policy.logprobs([policy.to_device(batch)])[0].double().numpy()
    exact = of_transformers(torch.float32, folder, batch)
    pairs = {"engine_trainer": of_engine - of_trainer, "engine_float32": of_engine - exact}
    if dtype == "bfloat16":
        pairs["transformers_float32"] = of_transformers(torch.bfloat16, folder, batch) - exact
    return pairs, round(float(of_engine.mean()), 2)


def small_model(family: str, seed: int = 0, multimodal: bool = False) -> PreTrainedModel:
    """Random weights in shapes that vLLM's kernels for CPUs support; `multimodal`: with a small image model."""
    torch.manual_seed(seed)
    config = shaped(family, initializer_range=0.08)
    if multimodal:
        config = type(AutoConfig.for_model(family))(text_config=config.to_dict(), vision_config=VISION)
    return of_kind(config).from_config(config, dtype=torch.float32).eval()  # type: ignore[no-any-return]


def shaped(family: str, **changes: Any) -> PretrainedConfig:
    """The family's small model in shapes for engines; if it has linear attention, in three of its four layers."""
    config = small_config(family)
    for name, size in SIZES.items():
        if getattr(config, name, None) is not None or name == "head_dim":
            setattr(config, name, size)
    if hasattr(config, "linear_num_key_heads"):
        changes["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
    for name, value in changes.items():
        setattr(config, name, value)
    config.num_hidden_layers = len(getattr(config, "layer_types", None) or ()) or config.num_hidden_layers
    return config


def of_kind(config: PretrainedConfig) -> Any:
    """The class of transformers that has all weights of the model."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def for_recipe(family: str, folder: Path, recipe: Path) -> Path:
    """Write a model with the recipe's tokenizer, in place of the Qwen3 that a run of the recipe would make. Gemma 3
    gets one layer of each kind."""
    config = load([recipe], []).config
    make_policy(config.model, config.env, config.run.seed, folder)
    tokenizer = load_tokenizer(folder)
    changes: dict[str, Any] = {"vocab_size": len(tokenizer), "tie_word_embeddings": True, "initializer_range": 0.02}
    changes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    if family == "gemma3":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    torch.manual_seed(config.run.seed)
    of_kind(shaped(family)).from_config(shaped(family, **changes), dtype=torch.float32).save_pretrained(folder)
    return folder


async def turns_of(dtype: str, folder: Path) -> tuple[MicroBatch, Float64s]:
    """Sampled turns as rows of one micro-batch, and the engine's log-probabilities of the sampled tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, length).astype(np.int32) for length in LENGTHS]
    config = settings(dtype)  # type: ignore[arg-type]
    generator = config.generator.model_copy(update={"kv_cache_bytes": None, "concurrent_groups": 1})
    return await sampled(config.model_copy(update={"generator": generator}), folder, prompts, SAMPLING)


@torch.no_grad()
def of_transformers(dtype: torch.dtype, folder: Path, batch: MicroBatch) -> Float64s:
    """The log-probabilities of the sampled tokens, by transformers' own forward pass of each row alone."""
    model = of_kind(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype)
    found = []
    for start, stop in pairwise(batch.offsets_R):
        ids_T = torch.from_numpy(batch.token_ids_N[start:stop]).long()
        logits_TV = model(ids_T[None]).logits[0, :-1].double() / SAMPLING.temperature
        of_T = logits_TV.log_softmax(-1).gather(1, ids_T[1:, None])[:, 0]
        found.append(of_T[torch.from_numpy(batch.loss_mask_N[start + 1 : stop])])
    return torch.cat(found).numpy()


if __name__ == "__main__":
    main()
