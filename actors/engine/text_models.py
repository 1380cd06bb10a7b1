"""Loads the language models of vLLM's multimodal families on CPUs without torchvision, whose wheels need CUDA.

`register` makes vLLM take the model classes from this module, in every process that inspects or loads a model. vLLM
needs torchvision only to process images, and Baton never does this. So empty modules replace torchvision during the
import.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

from transformers.utils import is_torchvision_available
from vllm import ModelRegistry

QWEN = [f"Qwen3_5{kind}For{task}" for kind in ("", "Moe") for task in ("CausalLM", "ConditionalGeneration")]
MODELS = dict.fromkeys(QWEN, "qwen3_5") | {"Gemma3ForConditionalGeneration": "gemma3_mm"}
"""The module of vLLM that defines each model class, by the name of the class."""
ABSENT = [f"torchvision{part}" for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")]


def __getattr__(name: str) -> object:
    """Import and return the model class of this name."""
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
    """Make vLLM take the model classes from this module."""
    for name in MODELS:
        ModelRegistry.register_model(name, f"{__name__}:{name}")
