"""Checkpoints of a learner: every rank writes the rows that it holds, and reads the rows that it needs.

    learner.json                            step, ranks that wrote, which frozen weights there are, shapes
    rank_0_of_2.safetensors                 weights/<name>, exp_avg/<name>, exp_avg_sq/<name>, reference/<name>, ...
    rank_1_of_2.safetensors

Shards are chunks of dimension 0, so a group of another size finds its rows in the files that hold them. No rank waits
for another: a checkpoint is whole when whoever asked all ranks for it has heard from all of them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from service.errors import UserError
from service.learn.files import chunk, sync

FACTS = "learner.json"


class CheckpointWriter:
    """Writes this rank's part; the copy is taken at once, the writing may go on in the background."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def start(self, folder: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        """Copy the tensors and begin to write them; waits for an earlier checkpoint first."""
        self.finish()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._writing = self._pool.submit(self._write, folder, copies, facts | {"world": self._world})

    def finish(self) -> None:
        """Wait until what was started is on disk; raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write(self, folder: Path, copies: dict[str, Tensor], facts: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / _file_name(self._rank, self._world)
        making = file.with_suffix(f".{os.getpid()}.making")
        save_file(copies, making)
        sync(making)
        if self._rank == 0:
            facts_making = folder / f"{FACTS}.{os.getpid()}.making"
            facts_making.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")
            shutil.copymode(facts_making, making)
            sync(facts_making)
            os.replace(facts_making, folder / FACTS)
        os.replace(making, file)
        sync(folder)


def read_facts(folder: Path) -> dict[str, Any]:
    """What the checkpoint says about itself; a `UserError` if it is not whole."""
    try:
        facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} holds no checkpoint: {FACTS} is missing") from None
    for rank in range(facts["world"]):
        if not (folder / _file_name(rank, facts["world"])).is_file():
            raise UserError(f"the checkpoint {folder} is not whole: {_file_name(rank, facts['world'])} is missing")
    return facts


@torch.no_grad()
def read_parts(
    folder: Path, wanted: Mapping[str, Tensor], lengths: Mapping[str, int], rank: int, world: int, written_by: int
) -> None:
    """Fill each tensor with this rank's rows of what `written_by` ranks wrote; `lengths` are the whole ones' rows."""
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(folder / _file_name(writer, written_by), framework="pt"))
            for writer in range(written_by)
        ]
        for name, tensor in wanted.items():
            start, stop = chunk(lengths[name], rank, world)
            for writer, file in enumerate(files):
                first, last = chunk(lengths[name], writer, written_by)
                begin, end = max(start, first), min(stop, last)
                if begin < end:
                    tensor[begin - start : end - start].copy_(file.get_slice(name)[begin - first : end - first])


def _file_name(rank: int, world: int) -> str:
    return f"rank_{rank}_of_{world}.safetensors"
