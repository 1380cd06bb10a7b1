"""The parts of the ranks are together one file of weights, whatever the rows that each rank has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from actors.weights.image import Image
from actors.weights.memory import WeightMemory
from actors.weights.part import WeightPart, check_parts
from actors.weights.part_buffers import PartBuffers
from tests.pure.actors.fakes import content, given_by, on_ranks


def published(
    version: int, weights: dict[str, Tensor], n_ranks: int, ranks: list[PartBuffers] | None = None
) -> list[PartBuffers]:
    """The ranks after this version, the same as before if there are any."""
    ranks = ranks or [PartBuffers(rank) for rank in range(n_ranks)]
    for buffers, rows in zip(ranks, on_ranks(weights, n_ranks), strict=True):
        buffers.copy(version, rows, next(iter(weights.values())).dtype)
    return ranks


@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    n_ranks=st.integers(1, 4),
    size=st.sampled_from([8, 24, 4096]),
)
def test_an_image_of_the_buckets_of_all_parts_is_the_file(rows: list[int], n_ranks: int, size: int) -> None:
    torch.manual_seed(len(rows))
    weights = {f"layers.{n}.weight": torch.randn(of, 1 + n).bfloat16() for n, of in enumerate(rows)}
    ranks = published(1, weights, n_ranks)
    check_parts([buffers.part for buffers in ranks])
    changed = {name: tensor + (torch.rand(tensor.shape) < 0.1) for name, tensor in weights.items()}
    for version, of in ((1, weights), (2, changed)):
        published(version, of, n_ranks, ranks)
        image = Image(version, sum(buffers.part.n_bytes for buffers in ranks))
        for buffers in ranks:
            for start in range(0, buffers.part.n_bytes, size):
                image.write(*given_by(buffers, start, min(start + size, buffers.part.n_bytes)))
        read = load(content(image))
        assert read.keys() == of.keys() and all(torch.equal(read[name], tensor) for name, tensor in of.items())
        image.close()


def test_one_rank_has_the_whole_file_in_one_span_and_two_have_each_row_once() -> None:
    weights = {"a": torch.zeros(4, 2), "b": torch.ones(3)}
    (alone,) = published(1, weights, 1)
    assert alone.part.spans == ((0, alone.part.n_bytes),)
    first, second = published(1, weights, 2)
    header = alone.part.n_bytes - 4 * 11
    assert first.part.spans == (
        (0, header + 16),
        (header + 32, 8),
    )
    assert second.part.spans == (
        (header + 16, 16),
        (header + 40, 4),
    )


@pytest.mark.parametrize("other", [[(4, 8)], [(16, 8)], []])
def test_parts_that_leave_bytes_out_or_have_them_twice_are_refused(other: list[tuple[int, int]]) -> None:
    first = WeightPart.of_spans([(0, 8), (12, 4)])
    check_parts([first, WeightPart.of_spans([(8, 4)])])
    with pytest.raises(ValueError, match="not each byte of the weights once"):
        check_parts([first, WeightPart.of_spans(other)])


@pytest.mark.parametrize("fails", ["__init__", "register"])
def test_memory_that_cannot_be_had_leaves_no_version_and_the_next_copy_is_readable(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rank,) = published(5, {"a": torch.full((4,), 5.0)}, 1)

    def refused(*_: object) -> None:
        raise RuntimeError("there is no memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setattr(WeightMemory, fails, refused)
        published(6, {"a": torch.full((80,), 6.0)}, 1, [rank])
    assert [rank.bucket(version, 0, rank.part.n_bytes) for version in (5, 6)] == [None, None]
    (rank,) = published(7, later := {"a": torch.full((4,), 7.0)}, 1, [rank])
    assert Path(rank.source.path.partition("#")[0]).exists()
    image = Image(7, rank.part.n_bytes)
    image.write(*given_by(rank, 0, rank.part.n_bytes))
    assert torch.equal(load(content(image))["a"], later["a"])
    image.close()


def test_a_copy_that_fails_half_way_is_given_under_no_version_and_the_next_one_is() -> None:
    """The second tensor has no data, so its copy raises after the first tensor was written."""
    (rank,) = published(2, {"a": torch.full((4,), 2.0), "b": torch.full((4,), 2.0)}, 1)
    later = {"a": torch.full((4,), 3.0), "b": torch.full((4,), 3.0)}
    with pytest.raises(NotImplementedError):
        published(3, {**later, "b": later["b"].to("meta")}, 1, [rank])
    assert [rank.bucket(version, 0, rank.part.n_bytes) for version in (2, 3)] == [None, None]
    (rank,) = published(4, later, 1, [rank])
    image = Image(4, rank.part.n_bytes)
    image.write(*given_by(rank, 0, rank.part.n_bytes))
    assert all(torch.equal(tensor, later[name]) for name, tensor in load(content(image)).items())
    image.close()
