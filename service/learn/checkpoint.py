"""Checkpoints of a learner: every rank writes the rows that it holds, and reads the rows that it needs.

    learner.json                            step, ranks that wrote, which frozen weights there are, shapes
    rank_0_of_2.safetensors                 weights/<name>, exp_avg/<name>, exp_avg_sq/<name>, reference/<name>, ...
    rank_1_of_2.safetensors                 ... and in each header the facts of learner.json again

Shards are chunks of dimension 0, so a group of another size finds its rows in the files that hold them. No rank waits
for another: a checkpoint is whole when whoever asked all ranks for it has heard from all of them. Where a part's facts
are not those of learner.json, a save over another into the same folder was cut off.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from service.errors import UserError
from service.files import atomic_file, sync, write_atomic
from service.learn.model.hf_checkpoint import chunk
from service.learn.optimizer import MOMENTS

FACTS = "learner.json"


class Facts(BaseModel):
    """What a checkpoint says about itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(ge=0)
    """Optimizer steps that the weights have had."""
    frozen: dict[Literal["proximal", "reference"], int]
    """The step at which each kind of frozen weights was taken."""
    shapes: dict[str, tuple[int, ...]]
    """Of each whole weight, by name."""
    world: int = Field(ge=1)
    """Ranks that wrote."""

    @property
    def parts(self) -> list[str]:
        """The files' names, by rank."""
        return [_file_name(rank, self.world) for rank in range(self.world)]


class CheckpointWriter:
    """Writes this rank's part; the copy is taken at once, the writing may go on in the background."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(self, folder: Path, tensors: Mapping[str, Tensor], facts: Facts) -> None:
        """Copy tensors and facts as they are now, and begin to write them; waits for an earlier checkpoint first."""
        self.finish()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._writing = self._pool.submit(self._write, folder, copies, facts.model_dump_json())

    def finish(self) -> None:
        """Wait until what was started is on disk; raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, folder: Path, copies: dict[str, Tensor], facts: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _file_name(self._rank, self._world)
        with atomic_file(file) as partial:
            save_file(copies, partial, {FACTS: facts})
            if self._rank == 0:
                write_atomic(folder / FACTS, facts + "\n")
                # safetensors creates files that only their owner may read
                shutil.copymode(folder / FACTS, partial)
        sync(folder)


def read_facts(folder: Path) -> Facts:
    """What the checkpoint says about itself; a `UserError` if it is not whole."""
    try:
        facts = Facts.model_validate_json((folder / FACTS).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{folder} holds no checkpoint: {FACTS} is missing") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"the checkpoint {folder} is damaged: {FACTS}: {where} {first['msg']}") from error
    for name in facts.parts:
        if not (folder / name).is_file():
            raise UserError(f"the checkpoint {folder} is not whole: {name} is missing")
    return facts


def check_parts(folder: Path, facts: Facts, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare all headers with what a learner of these shapes needs; reads no weights.

    Raises:
        UserError: the checkpoint is another model's, or a part is damaged or of another save.
    """
    for name in sorted(shapes.keys() | facts.shapes.keys()):
        there, here = facts.shapes.get(name), shapes.get(name)
        if there != here:
            raise UserError(
                f"the checkpoint {folder} is of another model: {name} has shape {there or 'none'} there, "
                f"{here or 'none'} here; resume with the model that it was written with"
            )
    for writer, name in enumerate(facts.parts):
        with ExitStack() as stack:
            part = _opened(folder / name, stack)
            if (part.metadata() or {}).get(FACTS) != facts.model_dump_json():
                raise UserError(f"the checkpoint {folder} is not whole: {name} is of another save than {FACTS}")
            found = {tensor: tuple(part.get_slice(tensor).get_shape()) for tensor in part.keys()}  # noqa: SIM118
        wanted = _shapes_of_part(facts, writer)
        if found != wanted:
            differing = min(tensor for tensor, _ in found.items() ^ wanted.items())
            raise UserError(f"the checkpoint {folder} is damaged: {differing} in {name} is not what {FACTS} says")


def _shapes_of_part(facts: Facts, writer: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, (length, *rest) in facts.shapes.items():
        first, last = chunk(length, writer, facts.world)
        found |= {f"{kind}/{name}": (last - first, *rest) for kind in ("weights", *MOMENTS, *facts.frozen)}
    return found


@torch.no_grad()
def read_parts(folder: Path, wanted: Mapping[str, Tensor], facts: Facts, rank: int, world: int) -> None:
    """Fill each tensor, named kind/weight, with this rank's rows of what the ranks wrote."""
    with ExitStack() as stack:
        files = [_opened(folder / name, stack) for name in facts.parts]
        for name, tensor in wanted.items():
            length = facts.shapes[name.partition("/")[2]][0]
            start, stop = chunk(length, rank, world)
            for writer, file in enumerate(files):
                first, last = chunk(length, writer, facts.world)
                begin, end = max(start, first), min(stop, last)
                if begin < end:
                    tensor[begin - start : end - start].copy_(file.get_slice(name)[begin - first : end - first])


def _opened(file: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint {file.parent} is damaged: {file.name} cannot be read: {error}") from error


def _file_name(rank: int, world: int) -> str:
    return f"rank_{rank}_of_{world}.safetensors"
