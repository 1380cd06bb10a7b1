"""The language models of vLLM's multimodal families on CPUs, without torchvision, whose wheels need CUDA.

`register` has vLLM take the classes from this module, in every process that inspects or loads a model. Importing them
needs torchvision only for the processing of images, which never runs: empty modules stand in while they are imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from transformers.utils import is_torchvision_available
from vllm import ModelRegistry

QWEN = [f"Qwen3_5{kind}For{task}" for kind in ("", "Moe") for task in ("CausalLM", "ConditionalGeneration")]
MODELS = dict.fromkeys(QWEN, "qwen3_5") | {"Gemma3ForConditionalGeneration": "gemma3_mm"}
"""Classes, and vLLM's modules that have them."""
ABSENT = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def __getattr__(name: str) -> object:
    """The class of this name."""
    if name not in MODELS:
        raise AttributeError(name)
    is_torchvision_available()  # transformers keeps the answer
    sys.modules.update({absent: ModuleType(absent) for absent in ABSENT})
    try:
        return getattr(import_module(f"vllm.model_executor.models.{MODELS[name]}"), name)
    finally:
        for absent in ABSENT:
            del sys.modules[absent]


def register() -> None:
    """Have vLLM take the classes from here."""
    for name in MODELS:
        ModelRegistry.register_model(name, f"{__name__}:{name}")
