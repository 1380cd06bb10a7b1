"""Reads, writes and checks adapter folders in PEFT's format, and merges an adapter into its base model.

adapter_config.json          rank, alpha, target modules, the path of the base model
adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...
                             and, in the header's metadata, the base model's fingerprint

A layer has its name in the base model's folder, such as `model.language_model.layers.0` for a multimodal model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from service.config.learn import LoraConfig
from service.errors import UserError
from service.files import atomic_folder, sync
from service.learn.model.hf_checkpoint import Names, stored_names, write_beside_weights
from service.learn.model.lora import merged
from service.learn.model.sharding import shard_rows
from service.model_folder import ADAPTER_CONFIG, INDEX, MODEL_CONFIG, weight_files

Named = TypeVar("Named")

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix that PEFT puts before the names of a model's parameters."""

FINGERPRINT = "base_fingerprint"

PIECES, PIECE_BYTES = 64, 1 << 16
"""Number, and size in bytes, of the pieces of a weights file from which a fingerprint is computed; hashing the whole
file would take minutes."""

REFUSED = (
    "use_dora", "use_rslora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices", "rank_pattern",
    "alpha_pattern", "layer_replication", "alora_invocation_tokens", "fan_in_fan_out", "use_bdlora", "arrow_config",
    "kasa_config", "monteclora_config"
)  # fmt: skip
"""Settings of PEFT for kinds of adapters that Baton does not train."""

INITS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of PEFT's `init_lora_weights` with which the base model stays as it is; others, as PiSSA's, change it."""


class Base(BaseModel):
    """The base model of an adapter."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """The base model's folder when the adapter was trained."""
    fingerprint: str
    """Hash of the model's configuration and of pieces of its weights."""

    @staticmethod
    def of(folder: Path) -> Base:
        """The base model in a Hugging Face folder."""
        hasher = xxhash.xxh3_128((folder / MODEL_CONFIG).read_bytes())
        for file in weight_files(folder):
            size = file.stat().st_size
            hasher.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                for piece in range(PIECES):
                    opened.seek(piece * max(0, size - PIECE_BYTES) // (PIECES - 1))
                    hasher.update(opened.read(PIECE_BYTES))
        return Base(path=str(folder.absolute()), fingerprint=hasher.hexdigest())

    def refuse_other(self, fingerprint: str, where: str) -> None:
        """Raise a `UserError` if `fingerprint`, found in the adapter folder `where`, is not the fingerprint of this
        base model."""
        if fingerprint != self.fingerprint:
            raise UserError(
                f"{where} is of an adapter for another model than {self.path}; use the model it was made for"
            )


def refuse_other_shapes(
    what: str, there: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]], remedy: str = ""
) -> None:
    """Raise a `UserError` unless the tensors in a folder (`there`) and of a model (`here`) have equal names and
    shapes."""
    for name in sorted(there.keys() | here.keys()):
        found, wanted = (tuple(shapes[name]) if name in shapes else None for shapes in (there, here))
        if found != wanted:
            raise UserError(
                f"{what} is of another model: {name} has shape {found or 'none'} there, {wanted or 'none'} here{remedy}"
            )


def peft_names(tensors: Mapping[str, Named], names: Names) -> dict[str, Named]:
    """Give an adapter's tensors PEFT's names for a base model whose folder has the names `names`. The values may be
    whole tensors, a rank's rows of them, or shapes."""
    return {PREFIX + names.stored(name): tensor for name, tensor in tensors.items()}


def write_adapter(folder: Path, base: Base, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter's folder, which appears only once it is complete."""
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "target_modules": sorted(lora.targets),
        "inference_mode": True,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out"), False),
    }
    names = stored_names(Path(base.path))
    if names.others:  # otherwise PEFT would look for targets in these parts
        settings["exclude_modules"] = rf"(.*\.)?({'|'.join(names.others)})\..*"
    with atomic_folder(folder) as partial:
        (partial / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        named = {name: tensor.contiguous() for name, tensor in peft_names(tensors, names).items()}
        save_file(named, partial / ADAPTER_WEIGHTS, {"format": "pt", FINGERPRINT: base.fingerprint})
        # safetensors creates files that only their owner may read
        shutil.copymode(partial / ADAPTER_CONFIG, partial / ADAPTER_WEIGHTS)
        for file in partial.iterdir():
            sync(file)


def adapter_settings(folder: Path) -> LoraConfig:
    """Read the settings of the adapter in a folder.

    Raises:
        UserError: the file is missing or malformed, or describes a kind of adapter that Baton cannot train.
    """
    file = folder / ADAPTER_CONFIG
    try:
        settings: Any = json.loads(file.read_text(encoding="utf-8"))
        if refused := [name for name in REFUSED if settings.get(name)]:
            raise UserError(f"model.adapter: {file} sets {refused[0]}, which is not trained; merge that adapter first")
        if (init := settings.get("init_lora_weights")) not in INITS:
            told = f"sets init_lora_weights={init!r:.40}, which changes the base model; merge that adapter with PEFT"
            raise UserError(f"model.adapter: {file} {told}")
        targets = settings["target_modules"]
        if settings["peft_type"] != "LORA" or settings.get("bias") not in (None, "none") or isinstance(targets, str):
            raise ValueError("peft_type, bias or target_modules is of another kind")
        return LoraConfig(rank=settings["r"], alpha=settings["lora_alpha"], targets=tuple(targets))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"model.adapter: {file} describes no LoRA adapter of named layers: {why:.200}") from error


def check_adapter(folder: Path, lora: LoraConfig, base: Base, shapes: Mapping[str, Sequence[int]]) -> None:
    """Check that the adapter in a folder can be trained further: it must have the settings `lora`, the base model
    `base` and tensors of the shapes `shapes`.

    Raises:
        UserError: a setting, the base model or a tensor differs; the message names the difference.
    """
    found = adapter_settings(folder)
    for name in ("rank", "alpha", "targets"):
        there, here = (getattr(settings, name) for settings in (found, lora))
        if set(there) != set(here) if name == "targets" else there != here:
            shown = f"[{','.join(sorted(there))}]" if name == "targets" else f"{there:g}"
            raise UserError(f"model.lora.{name}: the adapter {folder} has {shown}; set that, or leave the adapter out")
    _tensors(folder, base, shapes)


@torch.no_grad()
def read_adapter(
    folder: Path, base: Base, masters: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> None:
    """Fill this rank's shards with the adapter's tensors.

    Raises:
        UserError: the adapter has another base model, or its tensors have other names or shapes or are damaged.
    """
    tensors = _tensors(folder, base, {name: parameter.shape for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        masters[name].copy_(tensors[name][shard_rows(parameter)])


def _tensors(folder: Path, base: Base, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Tensor]:
    """An adapter's tensors by the names of the model's parameters; checks their shapes if `shapes` is given."""
    file = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
        names = stored_names(Path(base.path))
        tensors = {names.of_model(name.removeprefix(PREFIX)): tensor for name, tensor in load_file(file).items()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"model.adapter: {file} cannot be read: {error}") from error
    base.refuse_other(metadata.get(FINGERPRINT, base.fingerprint), str(folder))  # PEFT writes no fingerprint
    if shapes is not None:
        refuse_other_shapes(f"model.adapter: {folder}", {name: x.shape for name, x in tensors.items()}, shapes)
    for name, tensor in tensors.items():
        # a single non-finite number would make every log-probability NaN
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            raise UserError(f"model.adapter: {file} is damaged: {name} holds other than finite floating-point numbers")
    return tensors


def merge(adapter: Path, base: Path, folder: Path) -> int:
    """Add an adapter's update to its base model, and write the result as a float32 Hugging Face folder, which appears
    only once it is complete. Returns the number of matrices that the adapter changed.

    Each merge starts from the base model's weights, because repeated merges into the same weights would add up rounding
    errors, and a merge in bfloat16 would lose small updates.

    Raises:
        UserError: the adapter is malformed or belongs to another base model.
    """
    names = stored_names(base)
    tensors = {names.stored(name): tensor for name, tensor in _tensors(adapter, Base.of(base)).items()}
    settings, given = adapter_settings(adapter), len(tensors)
    with atomic_folder(folder) as partial:
        for file in weight_files(base):
            save_file(merged(load_file(file), tensors, settings), partial / file.name, {"format": "pt"})
        if tensors or not given:
            left = min(tensors, default="no tensor")
            raise UserError(f"{adapter} has {left} without its counterpart in {base}; they do not belong together")
        if (base / INDEX).is_file():
            shutil.copy2(base / INDEX, partial / INDEX)
        write_beside_weights(base, partial, torch.float32)
    return given // 2
