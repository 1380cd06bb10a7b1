"""What a reader pulls of a weights file, whose parts lie in the memories of several ranks, is what the ranks hold."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from actors.weights.memory import OpenMemory
from actors.weights.part import Source
from actors.weights.part_buffers import PartBuffers
from actors.weights.pulled import CPU, PulledTensor, WeightFile, file_of
from service.errors import WeightsGone
from tests.pure.actors.fakes import copied, on_ranks

WEIGHTS = {"a": torch.arange(30.0).view(5, 6), "b": torch.arange(7.0), "c": torch.arange(24.0).view(4, 3, 2)}


def sources(ranks: list[PartBuffers]) -> list[Source]:
    return [buffers.source for buffers in ranks]


class Counting(WeightFile):
    """Counts the bytes that are read, but those of the header."""

    read_bytes = 0

    def read(self, start: int, stop: int, device: torch.device = CPU) -> Tensor:
        self.read_bytes += stop - start
        return super().read(start, stop, device)


LOADERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "rows of one rank": (lambda a: a.narrow(0, 1, 1), 1),
    "rows of two ranks": (lambda a: a[1:4], 3),
    "columns": (lambda a: a.narrow(1, 2, 3), 5),
    "a chunk": (lambda a: a.chunk(2)[1], 2),
    "turned": (lambda a: a.t()[:, 2:3], 1),
    "flat": (lambda a: a.view(-1)[6:12], 1),
    "one row": (lambda a: a[4], 1),
    "nothing": (lambda a: a[2:2], 0),
    "all": (lambda a: a, 5),
    "another type": (lambda a: a[:2].to(torch.float64), 2),
    "a sum": (lambda a: a[3:] + 1, 2),
    "a copy": (lambda a: a[:1].clone(), 1),
    "reshaped from columns": (lambda a: a[:, :2].reshape(-1), 5),
    "of another view": (lambda a: a[1:].t()[:3].t()[:2], 2),
}


@pytest.mark.parametrize("n_ranks", [1, 3])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_loader_gets_its_part_and_only_the_rows_of_it_are_read(loader: str, n_ranks: int, inference: bool) -> None:
    take, n_rows = LOADERS[loader]
    ranks = copied(1, WEIGHTS, n_ranks)
    file = Counting(1, sources(ranks))
    with torch.inference_mode(inference):
        tensors = dict(file.tensors())
        assert all(tensors[name].shape == tensor.shape for name, tensor in WEIGHTS.items())
        file.read_bytes = 0
        part = take(tensors["a"])
        expected = take(WEIGHTS["a"])
        loaded = torch.empty(expected.shape, dtype=expected.dtype).copy_(part)
        assert torch.equal(loaded, expected)
        assert file.read_bytes == n_rows * 6 * 4


def test_shape_and_type_of_a_view_and_what_vllm_only_counts_are_not_read() -> None:
    ranks = copied(1, WEIGHTS, 2)
    file = Counting(1, sources(ranks))
    tensors = dict(file.tensors())
    file.read_bytes = 0
    torch.empty(5, 6, device="meta").copy_(tensors["a"])
    view = tensors["c"][1:3, :, 1]
    assert (view.shape, view.dtype, view.device, view.dim()) == ((2, 3), torch.float32, CPU, 2)
    assert isinstance(view, PulledTensor) and file.read_bytes == 0
    assert {*file.unread()} == {*WEIGHTS}
    torch.empty(2, 3).copy_(view)
    assert {*file.unread()} == {*WEIGHTS} - {"c"}


def test_a_loader_that_would_write_into_the_ranks_memory_is_refused() -> None:
    ranks = copied(1, WEIGHTS, 1)
    file = WeightFile(1, sources(ranks))
    part = dict(file.tensors())["a"][2:]
    with pytest.raises(TypeError, match=r"mul_.* would change weights that other processes read"):
        part.mul_(2)
    with pytest.raises(TypeError, match="would change weights"):
        part[0] = 0
    assert torch.equal(part.clone(), WEIGHTS["a"][2:])


def test_a_version_that_is_replaced_while_it_is_read_is_gone() -> None:
    ranks = copied(1, WEIGHTS, 2)
    file = WeightFile(1, sources(ranks))
    copied(2, WEIGHTS, ranks)
    file.check()  # the other buffer was filled
    ranks[1].copy(3, on_ranks(WEIGHTS, 2)[1], torch.float32)
    with pytest.raises(WeightsGone, match="version"):
        file.check()
    with pytest.raises(WeightsGone, match="version 2, not 3"):
        WeightFile(3, sources(ranks))


def test_memory_that_stays_is_opened_once_and_goes_with_ranks_that_were_replaced() -> None:
    ranks, kept = copied(1, WEIGHTS, 2), dict[str, OpenMemory]()
    before = len(os.listdir("/proc/self/fd"))
    for version in (2, 3, 4):
        copied(version, WEIGHTS, ranks)
        given = WeightFile(version, sources(ranks))
        file = file_of(given.info(), kept)
        assert torch.equal(dict(file.tensors())["c"].clone(), WEIGHTS["c"])
        opened = set(kept)
        del given, file
    assert len(opened) == 2 and len(os.listdir("/proc/self/fd")) == before + 2
    others = copied(1, WEIGHTS, 1)
    given = WeightFile(1, sources(others))
    file_of(given.info(), kept)
    assert not opened & set(kept)
    kept.clear()
    del given
    assert len(os.listdir("/proc/self/fd")) == before + 1, "that of the other rank itself"


def test_weights_of_a_rank_that_has_ended_stay_readable_for_who_had_opened_them() -> None:
    (rank,) = copied(1, WEIGHTS, 1)
    file = WeightFile(1, sources([rank]))
    place = sources([rank])
    rank._memory.close()
    assert torch.equal(dict(file.tensors())["a"].clone(), WEIGHTS["a"])
    with pytest.raises(WeightsGone, match="are gone"):
        WeightFile(1, place)
