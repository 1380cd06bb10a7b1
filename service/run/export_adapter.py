"""`baton export`: writes the adapter of a run or of a checkpoint, alone or merged into its base."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError

from service.config.lora import LoraConfig
from service.errors import UserError
from service.files import atomic_folder
from service.learn.checkpoint import read_metadata, read_parts
from service.learn.model.adapter_folder import Base, merge, write_adapter
from service.run.checkpoints import TRAINER, Manifest
from service.run.eval_target import EvalTarget


def export(
    lora: LoraConfig, target: EvalTarget, base: Path, manifest: Manifest | None, folder: Path, merged: bool
) -> None:
    """Write the adapter that `prepare_weights` has checked: in PEFT's form, or merged into its base as a float32
    Hugging Face folder. The folder appears only once it is complete.

    Raises:
        UserError: the folder cannot be written, say because the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="baton-export-") as parent:
            adapter = target.adapter if manifest is None else Path(parent) / "adapter"
            if adapter is None:
                raise ValueError(f"{target.path} has neither an adapter nor a checkpoint")
            if manifest is not None:
                parts = target.weights(manifest) / TRAINER
                metadata = read_metadata(parts)
                tensors = {name: torch.empty(shape) for name, shape in metadata.shapes.items()}
                read_parts(parts, {f"weights/{name}": tensor for name, tensor in tensors.items()}, metadata, 0, 1)
                write_adapter(adapter, Base.of(base), lora, tensors)
            if merged:
                merge(adapter, base, folder)
            else:
                with atomic_folder(folder) as partial:
                    shutil.copytree(adapter, partial, dirs_exist_ok=True)
    except SafetensorError as error:  # all inputs were checked before, so this is an output error such as a full disk
        raise UserError(f"{folder} cannot be written: {error}") from error
