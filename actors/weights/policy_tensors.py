"""Checks that weights arrive unchanged and complete, by a checksum, the announced tensors, and the size of the policy.

    trainer   data, checksum_of(data)   ->  Ray's object store  ->  node     verify(data, checksum)
                                                                    engine   size.check(shapes)

`data` is a bucket of a safetensors file, or for transports from GPU to GPU an announcement: a JSON list of the tensors.

An adapter's tensors have PEFT's names. For a folder with `model.layers.0.self_attn.q_proj.weight` [out, in] they are:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out, rank]
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from service.config import LoraConfig
from service.learn.model.adapter_folder import peft_names
from service.learn.model.hf_checkpoint import HEAD, stored_names
from service.learn.model.hf_config import read_config
from service.learn.model.policy_model import trained_shapes

Octets = NDArray[np.uint8]

WeightBytes = bytes | bytearray | memoryview | Octets
"""Bytes of weights or of an announcement; an array passes Ray's object store without a copy."""

ADAPTER = "policy"
"""Name of the adapter in the engine."""
ADAPTER_ID = 1
"""Number of the adapter in the engine; each publication replaces the adapter with this number."""

AdapterShapes = dict[str, tuple[int, ...]]
"""The shape of each tensor of an adapter, by the tensor's name."""


def checksum_of(data: WeightBytes) -> int:
    """Return the xxh3-64 checksum of these bytes."""
    return xxhash.xxh3_64_intdigest(memoryview(data))  # type: ignore[arg-type]  # an array is a buffer as well


def verify(data: WeightBytes, checksum: int) -> memoryview:
    """Check the checksum of these bytes and return them, without a copy.

    Raises:
        ValueError: the bytes have a different checksum.
    """
    view = memoryview(data).cast("B")  # type: ignore[arg-type]  # an array is a buffer as well
    found = checksum_of(view)
    if found != checksum:
        raise ValueError(f"weights of {len(view)} bytes have the checksum {found:016x}, not {checksum:016x}")
    return view


class TensorSpec(NamedTuple):
    """Name, type and shape of one tensor; in JSON `["model.norm.weight", "bfloat16", [64]]`."""

    name: str
    dtype: str
    """Torch's name of the type, such as `bfloat16`."""
    shape: tuple[int, ...]


class PolicySize(NamedTuple):
    """The number of elements in a publication of the policy, which is the whole model or its adapter."""

    elements: int
    tied: bool
    """Whether the output head is tied to the embedding; then the head is not counted."""
    adapter: AdapterShapes | None = None
    """The tensors of the adapter, if only the adapter is published; None if the whole model is published."""

    @staticmethod
    def of_folder(model_folder: Path, lora: LoraConfig | None = None) -> PolicySize:
        """Return the size of the weights that are trained: of the model in a Hugging Face folder, or with `lora` of an
        adapter for this model. Other parts of a multimodal model do not count."""
        config = read_config(model_folder)
        shapes = trained_shapes(config, lora)
        adapter = None if lora is None else peft_names(shapes, stored_names(model_folder))
        return PolicySize(sum(map(math.prod, shapes.values())), bool(config.tie_word_embeddings), adapter)

    def check(self, shapes: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Check that the tensors of an update are the whole policy, because vLLM would silently keep the old values of
        a missing tensor.

        Raises:
            ValueError: the tensors are more or less than the whole policy, or belong to another adapter.
        """
        shapes = list(shapes)
        if self.adapter is not None:
            other = {*self.adapter.items()} ^ {(name, tuple(shape)) for name, shape in shapes}
            if other:
                name, shape = min(other)
                raise ValueError(f"the tensors differ from those of the policy's adapter in {name} of {list(shape)}")
        # only some model folders store an output head that is tied to the embedding
        found = sum(math.prod(shape) for name, shape in shapes if not (self.tied and name == HEAD))
        if found != self.elements:
            raise ValueError(f"weights have {found} numbers, but the policy has {self.elements}")


def encode_announcement(weights: Mapping[str, Tensor], **more: Any) -> bytes:
    """Encode an announcement as JSON: the ordered list of the tensors that go from GPU to GPU, and `more` data for the
    receiver."""
    specs = [TensorSpec(name, str(w.dtype).removeprefix("torch."), tuple(w.shape)) for name, w in weights.items()]
    return json.dumps({"tensors": specs, **more}).encode()


def decode_announcement(data: WeightBytes, checksum: int, size: PolicySize) -> tuple[dict[str, Any], int]:
    """Check an announcement. Returns its data, with which an engine's workers receive the tensors, and the number of
    bytes of all tensors.

    Raises:
        ValueError: the announcement was changed on the way, or names more or less than the whole policy.
    """
    info: dict[str, Any] = json.loads(bytes(verify(data, checksum)))
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in info["tensors"]]
    size.check((spec.name, spec.shape) for spec in specs)
    return info, sum(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in specs)
