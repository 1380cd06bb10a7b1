"""Refuses arguments of vLLM's engines that Baton sets itself, or with which a run would train wrongly. All other
`generator.engine_options` are passed on; vLLM checks them when an engine starts."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

REFUSED = {
    "it changes the sampling distribution, which the trainer recomputes: top_p, top_k and min_p are settings of "
    "generator, and penalties would make every importance ratio wrong; leave it out": "top_[pk] min_p "
    "(repetition|presence|frequency)_penalty logit_bias",
    "a token must come from the policy's own distribution, with the settings of generator": "speculative_config "
    "(per_request_)?spec_.* logits_processors watermark_config (override_)?generation_config enable_trace_replay "
    "return_sampling_mask diffusion_config logprobs_mode hf_overrides",
    "it follows from the settings of model, run and generator": "model dtype seed tensor_parallel_size enforce_eager "
    "gpu_memory_utilization kv_cache_memory_bytes quantization max_model_len max_num_seqs enable_lora max_(cpu_)?loras "
    "max_lora_.* lora_target_modules language_model_only",
    "Baton replaces the weights in place by the names of model.path; weights elsewhere would be missed": "worker_.*cls "
    "weight_transfer_config (cpu_)?offload_.* quantization_config .*eplb.* .*elastic_ep.* enable_ep_weight_filter "
    ".*sleep.* enable_cumem_allocator enable_nccl_comm_suspend model_class_overrides",
    "Baton sizes the KV cache and drops it after an update; another cache would keep older ones": "block_size "
    "kv_(transfer|events|offloading)_.* ec_.* engram_config enable_prefix_caching num_gpu_blocks_override",
    "an engine is one actor, which Ray gives its GPUs, and which Baton starts again; for more engines set "
    "generator.engines": "data_parallel_.* dp_.* distributed_executor_backend nnodes node_rank master_.* device_ids "
    "prefill_context_parallel_size _api_process_.* .*fault_tolerance.* ray_.*",
    "the model and its tokenizer are those of model.path, which runs no code of its own": "tokenizer.* hf_.* revision "
    "skip_tokenizer_init trust_remote_code code_revision model_weights config_format load_format download_dir",
    "Baton reads the load of the engine, the routed experts and the supports": "enable_return_routed_experts "
    "disable_log_stats max_logprobs",
}
"""Why engine arguments are refused: patterns of their names, by reason."""


def refusal(name: str) -> str | None:
    """Why an engine argument of this name is refused; None if it is passed on."""
    return next(
        (why for why, names in REFUSED.items() if any(re.fullmatch(each, name) for each in names.split())), None
    )


def refusals(options: Mapping[str, Any]) -> Iterator[str]:
    """One line for each option that cannot be set."""
    for name in options:
        setting, known = f"generator.engine_options.{name}", installed_names()
        if (reason := refusal(name)) is not None:
            yield f"{setting}: {reason}"
        elif known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            yield f"{setting}: vLLM has no such engine argument" + (f"; did you mean {near[0]}?" if near else "")
    if type(stages := options.get("pipeline_parallel_size", 1)) is not int or stages < 1:
        yield f"generator.engine_options.pipeline_parallel_size: must be a whole number from 1 on, not {stages!r}"


@cache
def installed_names() -> tuple[str, ...]:
    """The names of the engine arguments of the installed vLLM, read from its source without an import; empty if vLLM is
    not installed."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return ()
    source = (Path(found.origin).parent / "engine" / "arg_utils.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and "EngineArgs" in node.name]
    fields = [field.target for of in classes for field in of.body if isinstance(field, ast.AnnAssign)]
    return tuple(field.id for field in fields if isinstance(field, ast.Name))
