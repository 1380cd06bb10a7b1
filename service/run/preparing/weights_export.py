"""`baton export`: writes the weights of a run or a checkpoint as a Hugging Face folder, or only the adapter."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError

from service.config import LoraConfig, ModelConfig
from service.errors import UserError
from service.files import atomic_folder
from service.learn.checkpoint import read_metadata, read_parts
from service.learn.model.adapter_folder import Base, merge, write_adapter
from service.learn.model.hf_checkpoint import stored_names, write_folder
from service.run.checkpoints import MANIFEST, TRAINER, Manifest
from service.run.preparing.eval_target import EvalTarget


def export(model: ModelConfig, target: EvalTarget, manifest: Manifest | None, folder: Path, merged: bool = True) -> int:
    """Write weights to a folder, in `model.dtype`; `prepare_weights` has checked them. The folder appears only when it
    is complete. An adapter is merged into its base in float32, or written alone in PEFT's form. Returns the number of
    merged matrices. `UserError` if the checkpoint was deleted meanwhile, or the folder cannot be written."""
    try:
        if model.lora is not None and target.model is None:
            return _export_adapter(model.lora, target, target.begun_with(model), manifest, folder, merged)
        elif manifest is not None:
            base = target.begun_with(model)
            weights = stored_names(base).split(_weights(target, manifest, getattr(torch, model.dtype)))
            write_folder(folder, base, weights)
        else:
            _copy(target.weights(None), folder)
    except SafetensorError as error:  # all inputs were checked before, so this is an output error such as a full disk
        raise UserError(f"{folder} cannot be written: {error}") from error
    return 0


def _export_adapter(
    lora: LoraConfig, target: EvalTarget, base: Path, manifest: Manifest | None, folder: Path, merged: bool
) -> int:
    with tempfile.TemporaryDirectory(prefix="baton-export-") as parent:
        adapter = target.weights(None) if manifest is None else Path(parent) / "adapter"
        if manifest is not None:
            write_adapter(adapter, Base.of(base), lora, _weights(target, manifest, torch.float32))
        if merged:
            return merge(adapter, base, folder)
        _copy(adapter, folder)
        return 0


def _weights(target: EvalTarget, manifest: Manifest, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole weights in a checkpoint, by the names of the model's parameters."""
    path = target.weights(manifest)
    try:
        metadata = read_metadata(path / TRAINER)
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in metadata.shapes.items()}
        wanted = {f"weights/{name}": tensor for name, tensor in tensors.items()}
        read_parts(path / TRAINER, wanted, metadata, rank=0, of=1)
    except UserError as error:
        if (path / MANIFEST).exists():
            raise
        raise UserError(f"{path}: the run has deleted this checkpoint meanwhile; take a newer one") from error
    return tensors


def _copy(source: Path, folder: Path) -> None:
    with atomic_folder(folder) as partial:
        shutil.copytree(source, partial, dirs_exist_ok=True)
