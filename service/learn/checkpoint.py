"""Checkpoints of a learner. Every rank writes the rows of its shard, and reads the rows that it needs.

    learner.json                            step, number of ranks, kinds of frozen weights, shapes
    rank_0_of_2.safetensors                 weights/<name>, exp_avg/<name>, exp_avg_sq/<name>, reference/<name>, ...
    rank_1_of_2.safetensors                 ... and in each header the metadata of learner.json again

Shards are chunks of dimension 0. If the number of ranks has changed, each rank reads its rows from the files that
contain these rows. No rank waits for another rank: a checkpoint is complete when every rank has finished its part. If
the metadata in a part's header differs from learner.json, a save into this folder was interrupted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from service.errors import UserError
from service.files import atomic_file, sync, write_atomic
from service.learn.model.adapter_folder import Base, refuse_other_shapes
from service.learn.model.host_copies import HostCopies
from service.learn.model.optimizer import MOMENTS
from service.learn.model.sharding import shard_bounds

METADATA_FILE = "learner.json"
CHUNK_BYTES = 64 << 20
"""Bytes that are written between two syncs, so that the driver sees progress even on a slow disk."""
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of the tensors' dtypes in the header of a safetensors file."""


class CheckpointMetadata(BaseModel):
    """Metadata of a checkpoint, stored in `learner.json` and in the header of every part."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(ge=0)
    """Number of optimizer steps taken before the checkpoint."""
    frozen: dict[Literal["proximal", "reference"], int]
    """For each kind of frozen weights, the number of optimizer steps that had been taken when they were copied."""
    shapes: dict[str, tuple[int, ...]]
    """Shape of each whole weight, by name."""
    base: Base | None = None
    """The base model of an adapter; None if the checkpoint contains all weights of the model."""
    alpha: float | None = None
    """`model.lora.alpha` of the adapter, which cannot be read from its shapes; None if unknown or without an
    adapter."""
    world_size: int = Field(ge=1)
    """Number of ranks that wrote the checkpoint: the ranks of one copy of the policy."""

    def text(self) -> str:
        """The metadata as JSON text; fields that are None are left out."""
        return self.model_dump_json(exclude_none=True)

    @property
    def parts(self) -> list[str]:
        """The file name of each rank's part, in the order of the ranks."""
        return [_file_name(rank, self.world_size) for rank in range(self.world_size)]

    def rows(self, weight: str, writer: int) -> tuple[int, int]:
        """Start and end of the rows of a weight that the rank `writer` wrote."""
        return shard_bounds(self.shapes[weight][0], writer, self.world_size)

    def part_shapes(self, writer: int) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in the part of the rank `writer`, by `kind/weight`."""
        rows = {weight: self.rows(weight, writer) for weight in self.shapes}
        shapes = {weight: (stop - start, *self.shapes[weight][1:]) for weight, (start, stop) in rows.items()}
        kinds = ("weights", *MOMENTS, *self.frozen)
        return {f"{kind}/{weight}": shape for kind in kinds for weight, shape in shapes.items()}


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Within the block, turn an error from writing a file, such as a full disk, into an OSError that names the
    folder."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise OSError(f"{folder} cannot be written: {error}") from error


class CheckpointWriter:
    """Writes this rank's part of a checkpoint: copies the tensors immediately, and writes the copies to disk in the
    background."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._copies = HostCopies()
        self._n_bytes = 0
        """Number of bytes of all checkpoints that are on disk."""

    def start(self, folder: Path, tensors: Mapping[str, Tensor], metadata: CheckpointMetadata) -> None:
        """Wait until the previous checkpoint is written, copy tensors and metadata, and begin to write the copies."""
        self.finish()
        # the largest elements first, so that every tensor is aligned
        tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        of = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        header = file_header(of, {METADATA_FILE: metadata.text()})
        copies = self._copies.take(tensors.values())
        self._writing = self._pool.submit(self._write, folder, header, copies, metadata.text())

    def finish(self) -> None:
        """Wait until the started checkpoint is on disk; if the write failed, raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def progress(self) -> int | None:
        """The number of bytes that are on disk so far, counted from the first checkpoint on; None if the started
        checkpoint is on disk. If the write failed, raise its error."""
        if self._writing is not None and not self._writing.done():
            return self._n_bytes
        self.finish()
        return None

    def _write(self, folder: Path, header: bytes, copies: Tensor, metadata: str) -> None:
        file = folder / _file_name(self._rank, self._world_size)
        with written(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as partial:
                with partial.open("wb") as opened:
                    opened.write(header)
                    # `save_file` of safetensors would sync all bytes at once
                    for chunk in torch.split(copies, CHUNK_BYTES):
                        opened.write(chunk.numpy().data)
                        opened.flush()
                        os.fsync(opened.fileno())
                        self._n_bytes += len(chunk)
                if self._rank == 0:
                    write_atomic(folder / METADATA_FILE, metadata + "\n")
            sync(folder)


def file_header(
    tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The header of a safetensors file whose data are these tensors, one after another; `tensors`: the type and shape
    of each."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    stop = 0
    for name, (dtype, shape) in tensors.items():
        start, stop = stop, stop + prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": [*shape], "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return len(text).to_bytes(8, "little") + text


def read_metadata(folder: Path) -> CheckpointMetadata:
    """Read a checkpoint's metadata.

    Raises:
        UserError: `learner.json` is missing or damaged, or a part is missing.
    """
    try:
        metadata = CheckpointMetadata.model_validate_json((folder / METADATA_FILE).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} holds no checkpoint: {METADATA_FILE} is missing (step 0 may be the model)") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"the checkpoint {folder} is damaged: {METADATA_FILE}: {where} {first['msg']}") from error
    for name in metadata.parts:
        if not (folder / name).is_file():
            raise UserError(f"the checkpoint {folder} is not whole: {name} is missing")
    return metadata


def check_parts(
    folder: Path,
    metadata: CheckpointMetadata,
    shapes: Mapping[str, tuple[int, ...]],
    base: Base | None,
    alpha: float | None,
) -> None:
    """Check that a checkpoint was written with the given weight shapes, base model and `alpha`, and that all its parts
    were written in one save. Reads no weights.

    Raises:
        UserError: the checkpoint is of another model or has another `alpha`; or a part is damaged or of another save.
    """
    if (metadata.base is None) != (base is None):
        held, trained = ("all weights", "an adapter") if metadata.base is None else ("an adapter", "all weights")
        raise UserError(
            f"the checkpoint {folder} holds {held}, but the configuration trains {trained} (model.lora); resume with "
            "the setting that it was written with"
        )
    if metadata.base is not None and base is not None:
        base.refuse_other(metadata.base.fingerprint, f"the checkpoint {folder}")
        if metadata.alpha is not None and metadata.alpha != alpha:
            raise UserError(
                f"model.lora.alpha: the checkpoint {folder} was written with {metadata.alpha:g}, and another value "
                "would change the adapter's policy; set that value"
            )
    remedy = "; resume with the model that it was written with"
    refuse_other_shapes(f"the checkpoint {folder}", metadata.shapes, shapes, remedy)
    for writer, name in enumerate(metadata.parts):
        with ExitStack() as stack:
            part = _opened(folder / name, stack)
            if (part.metadata() or {}).get(METADATA_FILE) != metadata.text():
                raise UserError(f"the checkpoint {folder} is not whole: {name} is of another save than {METADATA_FILE}")
            found = {tensor: (*part.get_slice(tensor).get_shape(),) for tensor in part.keys()}  # noqa: SIM118
            if found != metadata.part_shapes(writer):
                raise UserError(f"the checkpoint {folder} is damaged: {name} has other tensors than {METADATA_FILE}")


@torch.no_grad()
def read_parts(folder: Path, wanted: Mapping[str, Tensor], metadata: CheckpointMetadata, rank: int, of: int) -> None:
    """Fill each tensor of `wanted` with the rows of rank `rank` among `of` ranks, read from the parts that contain
    them. Names are `kind/weight`."""
    with ExitStack() as stack:
        files = [_opened(folder / name, stack) for name in metadata.parts]
        for name, tensor in wanted.items():
            weight = name.partition("/")[2]
            start, stop = shard_bounds(metadata.shapes[weight][0], rank, of)
            for writer, file in enumerate(files):
                first, last = metadata.rows(weight, writer)
                begin, end = max(start, first), min(stop, last)
                if begin < end:
                    tensor[begin - start : end - start].copy_(file.get_slice(name)[begin - first : end - first])


def _opened(file: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint {file.parent} is damaged: {file.name} cannot be read: {error}") from error


def _file_name(rank: int, world_size: int) -> str:
    return f"rank_{rank}_of_{world_size}.safetensors"
