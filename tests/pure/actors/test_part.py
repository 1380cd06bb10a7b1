"""The parts of the ranks are together one file of weights, whatever the rows that each rank has."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from actors.weights import part_buffers
from actors.weights.image import ImageHolder
from actors.weights.memory import NO_VERSION, OpenMemory
from actors.weights.part import WeightPart, check_parts
from actors.weights.part_buffers import PartBuffers
from tests.pure.actors.fakes import content, copied, given_by


def in_buckets(version: int, ranks: list[PartBuffers], size: int = 4096) -> dict[str, Tensor]:
    """What an image has after the buckets of all ranks."""
    holder = ImageHolder()
    holder._begun(version, sum(buffers.part.n_bytes for buffers in ranks))
    for buffers in ranks:
        for start in range(0, n_bytes := buffers.part.n_bytes, size):
            holder._write(version, *given_by(buffers, start, min(start + size, n_bytes)))
    return load(content(holder._memory))


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    n_ranks=st.integers(1, 4),
    size=st.sampled_from([8, 24, 4096]),
)
def test_an_image_of_the_buckets_of_all_parts_is_the_file(rows: list[int], n_ranks: int, size: int) -> None:
    torch.manual_seed(len(rows))
    weights = {f"layers.{n}.weight": torch.randn(of, 1 + n).bfloat16() for n, of in enumerate(rows)}
    ranks = copied(1, weights, n_ranks)
    check_parts([buffers.part for buffers in ranks])
    changed = {name: tensor + (torch.rand(tensor.shape) < 0.1) for name, tensor in weights.items()}
    for version, of in ((1, weights), (2, changed)):
        read = in_buckets(version, copied(version, of, ranks), size)
        assert read.keys() == of.keys() and all(torch.equal(read[name], tensor) for name, tensor in of.items())


@pytest.mark.parametrize("other", [[(4, 8)], [(16, 8)], []])
def test_parts_that_leave_bytes_out_or_have_them_twice_are_refused(other: list[tuple[int, int]]) -> None:
    first = WeightPart.of_spans([(0, 8), (12, 4)])
    check_parts([first, WeightPart.of_spans([(8, 4)])])
    with pytest.raises(ValueError, match="not each byte of the weights once"):
        check_parts([first, WeightPart.of_spans(other)])


@pytest.mark.parametrize("fails", ["WeightMemory", "register", "copy"])
def test_a_copy_that_fails_leaves_no_version_and_the_next_one_is_readable(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no memory, or the copy raises half-way, because the second tensor has no data."""
    (rank,) = copied(5, {"a": torch.ones(4), "b": torch.ones(4)}, 1)

    def refused(*_: object) -> None:
        raise NotImplementedError

    with monkeypatch.context() as patch, pytest.raises(NotImplementedError):
        if fails != "copy":
            patch.setattr(part_buffers, fails, refused)
        copied(6, {"a": torch.ones(4 if fails == "copy" else 80), "b": torch.ones(4, device="meta")}, [rank])
    assert [rank.bucket(version, 0, rank.part.n_bytes) for version in (5, 6)] == [None, None]
    memory = OpenMemory(rank.source.path)
    assert 6 not in (memory.version(0), memory.version(1))
    assert fails != "copy" or memory.version(rank.source.buffer) == NO_VERSION, "its bytes are of both versions"
    copied(7, later := {"a": torch.full((4,), 7.0), "b": torch.zeros(4)}, [rank])
    assert Path(rank.source.path.partition("#")[0]).exists()
    assert all(torch.equal(tensor, later[name]) for name, tensor in in_buckets(7, [rank]).items())
