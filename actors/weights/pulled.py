"""Reads a weights file whose parts lie in several memory regions; only the bytes that are used are read.

    rank 0   | header | a: rows 0 1 | b: row 0 |     PulledTensor a [4, ...]  --narrow(0, 1, 2)-->  rows 1 2
    rank 1   | a: rows 2 3 | b: row 1 |              --copy_-->  reads row 1 of rank 0 and row 2 of rank 1

vLLM's loaders take a worker's part of a tensor (rows for some layers, columns for others) and copy it into a parameter.
A `PulledTensor` lets a loader take such a view before any data is read; the copy then reads only the rows that the view
touches. Any other operation on a `PulledTensor` reads its values first. So this module does not depend on vLLM's
layouts, and nothing is read twice.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from actors.weights.memory import OpenMemory
from actors.weights.part import Source, WeightPart
from service.errors import WeightsGone
from service.learn.checkpoint import TYPES
from service.learn.model.host_copies import register

DTYPES = {name: dtype for dtype, name in TYPES.items()}
CPU = torch.device("cpu")

ReadRows = Callable[[int, int, torch.device], Tensor]
"""A function (start, stop, device) that reads the rows from `start` to `stop` of a tensor to the device; returns their
elements, [(stop - start) x ...]."""


class StoredTensor(NamedTuple):
    """Type, shape and position of a tensor in a weights file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int
    """First byte of the tensor in the file."""


class WeightFile:
    """The weights file of one version, opened for reading."""

    def __init__(self, version: int, sources: Sequence[Source], kept: dict[str, OpenMemory] | None = None) -> None:
        """Open the file. `kept`: memory that stays open from one version to the next, by inode number. Memory that
        the file needs is added; memory that it does not need, such as that of ended ranks, is removed.

        Raises:
            WeightsGone: a holder has ended, or has another version.
        """
        self._version, self._sources = version, [source for source in sources if source.part.spans]
        is_kept, kept = kept is not None, {} if kept is None else kept
        paths = {source.path.partition("#")[2]: source.path for source in self._sources}
        for number in kept.keys() - paths:
            del kept[number]
        for number in paths.keys() - kept:
            kept[number] = OpenMemory(paths[number])
            if is_kept:  # memory that is opened only to read the header is not registered, which takes longer
                register(kept[number].octets)
        self._memories = {path: kept[number] for number, path in paths.items()}
        """All memory regions of the file, by path."""
        self.check()
        self._spans = sorted(
            (
                (at, n_bytes, self._memories[source.path].octets, source.start + end - n_bytes)
                for source in self._sources
                for (at, n_bytes), end in zip(source.part.spans, source.part.ends, strict=True)
            ),
            key=itemgetter(0),
        )
        self._starts = [at for at, *_ in self._spans]
        self._read = set[int]()
        """The positions of the tensors of which values were read."""

    @property
    def n_bytes(self) -> int:
        """Return the number of bytes of all parts."""
        return sum(source.part.n_bytes for source in self._sources)

    def check(self) -> None:
        """Check the version of every part; call this before and after reading.

        Raises:
            WeightsGone: a part was replaced, or is being replaced.
        """
        for source in self._sources:
            if (found := self._memories[source.path].version(source.buffer)) != self._version:
                raise WeightsGone(f"the weights at {source.path} are gone (version {found}, not {self._version})")

    def read(self, start: int, stop: int, device: torch.device = CPU) -> Tensor:
        """Return the bytes from `start` to `stop` of the file, [n] uint8. No copy is made if one span of a part has all
        these bytes and `device` is the CPU."""
        pieces = list[Tensor]()
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            at, n_bytes, octets, begin = self._spans[number]
            end = min(stop, at + n_bytes)
            pieces.append(octets[begin + start - at : begin + end - at])
            start, number = end, number + 1
        if len(pieces) == 1:
            return pieces[0].to(device, non_blocking=True)
        whole = torch.empty(sum(map(len, pieces)), dtype=torch.uint8, device=device)
        for place, piece in zip(torch.split(whole, [*map(len, pieces)]), pieces, strict=True):
            place.copy_(piece, non_blocking=True)
        return whole

    @property
    def header(self) -> bytes:
        """Return the header: names, types, shapes and positions of all tensors, as JSON."""
        length = int.from_bytes(self.read(0, 8).numpy().tobytes(), "little")
        return self.read(8, 8 + length).numpy().tobytes()

    def follow(self, newer: WeightFile) -> None:
        """Read from a newer file with the same header from now on, also for tensors that exist already."""
        self._version, self._sources, self._memories = newer._version, newer._sources, newer._memories
        self._spans, self._starts = newer._spans, newer._starts

    def stored(self) -> dict[str, StoredTensor]:
        """Return the tensors that the file's header lists, by name.

        Raises:
            ValueError: the parts are not a complete safetensors file.
        """
        try:
            start = 8 + len(octets := self.header)
            header: dict[str, Any] = json.loads(octets)
            header.pop("__metadata__", None)
            if start + max((each["data_offsets"][1] for each in header.values()), default=0) != self.n_bytes:
                raise ValueError("data were cut off")
            return {
                name: StoredTensor(DTYPES[each["dtype"]], (*each["shape"],), start + each["data_offsets"][0])
                for name, each in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"weights of {self.n_bytes} bytes are not a safetensors file") from error

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of every tensor of the file; a tensor's values are read only when they are used."""
        for name, (dtype, shape, at) in self.stored().items():
            width = prod(shape[1:])
            read = partial(self._rows, dtype, at, width * dtype.itemsize)
            yield name, PulledTensor(read, width, torch.empty(shape, dtype=dtype, device="meta"))

    def unread(self) -> list[str]:
        """Return the names of the tensors of which no values were read."""
        return [name for name, stored in self.stored().items() if stored.at not in self._read]

    def _rows(self, dtype: torch.dtype, at: int, n_bytes: int, start: int, stop: int, device: torch.device) -> Tensor:
        """Read the rows from `start` to `stop` of the tensor at byte `at`, whose rows have `n_bytes` each."""
        self._read.add(at)
        octets = self.read(at + start * n_bytes, at + stop * n_bytes, device)
        return (octets if octets.storage_offset() % dtype.itemsize == 0 else octets.clone()).view(dtype)

    def info(self) -> dict[str, Any]:
        """Return data with which `file_of` opens the file in another process of this host, while this process has it
        open."""
        sources = [(part.spans, self._memories[path].path, *where) for part, path, *where in self._sources]
        return {"version": self._version, "sources": sources}

    def close(self) -> None:
        """Release the file's memory, which closes it unless it is kept; tensors read from it remain valid."""
        self._memories, self._spans = {}, []


def file_of(info: Mapping[str, Any], kept: dict[str, OpenMemory]) -> WeightFile:
    """Open a weights file that another process has open; `info` comes from `WeightFile.info` of that process. `kept`,
    and what is raised: as for `WeightFile`."""
    sources = [Source(WeightPart.of_spans(spans), *where) for spans, *where in info["sources"]]
    return WeightFile(info["version"], sources, kept)


class PulledTensor(Tensor):
    """A view of a tensor whose values are read only when they are needed."""

    values_read = 0
    """Number of operations, other than copies, that have read the values of any such tensor."""
    read_rows: ReadRows
    """Reads the stored tensor; all its views have this function."""
    _width: int
    """Number of elements in a row of the stored tensor."""
    _view: Tensor
    """The same view of a tensor that has the stored shape but no data."""

    @staticmethod
    def __new__(cls, read: ReadRows, width: int, view: Tensor) -> PulledTensor:
        """Create the view; it appears as a tensor in CPU memory."""
        made: PulledTensor = Tensor._make_wrapper_subclass(
            cls, view.shape, strides=view.stride(), storage_offset=view.storage_offset(), dtype=view.dtype
        )
        made.read_rows, made._width, made._view = read, width, view
        return made

    def pulled(self, device: torch.device = CPU) -> Tensor:
        """Return the view with its values, on the device. All rows of the stored tensor, from the first to the last one
        that the view touches, are read as whole rows."""
        view = self._view
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype, device=device)
        width = self._width
        last = view.storage_offset() + sum((n - 1) * step for n, step in zip(view.shape, view.stride(), strict=True))
        first_row = view.storage_offset() // width
        rows = self.read_rows(first_row, last // width + 1, device)
        offset = rows.storage_offset() + view.storage_offset() - first_row * width
        return rows.as_strided(view.shape, view.stride(), offset)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow a view; for any other operation read the values. Writing is refused, because other processes read the
        same memory.

        Raises:
            TypeError: the operation would change the values.
        """
        first, *others = args
        if func._schema.is_mutable and isinstance(first, cls):
            raise TypeError(f"{func} would change weights that other processes read")
        if func.is_view and isinstance(first, cls):
            viewed = func(first._view, *others, **(kwargs or {}))
            views = viewed if isinstance(viewed, list | tuple) else [viewed]
            if all(_is_of(view, first._view) for view in views):
                made = [cls(first.read_rows, first._width, view) for view in views]
                return made if isinstance(viewed, list | tuple) else made[0]
        if func is torch.ops.aten.copy_.default:  # vLLM copies into meta tensors to count elements
            return first if first.is_meta else func(first, others[0].pulled(first.device), *others[1:])
        cls.values_read += 1
        args, kwargs = tree_map(lambda each: each.pulled() if isinstance(each, cls) else each, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_of(view: Tensor, other: Tensor) -> bool:
    """Return whether `view` shares the memory of `other`; some view operations may return a copy instead."""
    same = view.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and view.dtype == other.dtype and view.is_meta
