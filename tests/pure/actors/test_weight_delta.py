"""What changed between two versions of weights travels, and the images that take it are those of the new version."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.weights.delta import MAX_CHANGED, SKIP, WeightBucket, bucket_of, decode, encode
from actors.weights.image import Image
from actors.weights.part import PartBuffers
from tests.pure.actors.fakes import all_rows, content, given_by, take

N = 4096
GENERATOR = np.random.default_rng(0)


def both(base: np.ndarray, new: np.ndarray, itemsize: int) -> tuple[WeightBucket, np.ndarray]:
    """The bucket of `new`, and its message as a change of `base`."""
    bucket = bucket_of(2, 0, 0, new)._replace(base=bucket_of(1, 0, 0, base).checksum, itemsize=itemsize)
    return encode(bucket, base, new, whole=False)


@given(
    places=st.sets(st.integers(0, N - 1), max_size=int(N * MAX_CHANGED)),
    itemsize=st.sampled_from([2, 4]),
)
def test_any_change_is_decoded_to_the_bytes_that_it_was_made_from(places: set[int], itemsize: int) -> None:
    base = np.zeros(N * itemsize, np.uint8)
    new = base.copy()
    new.view(f"u{itemsize}")[[*places]] = 7
    bucket, message = both(base, new, itemsize)
    assert bucket.changed == len(places) and bucket.message_bytes == len(message)
    assert len(message) <= (itemsize + 1) * len(places) + N // SKIP
    assert bytes(decode(bucket, message, bytearray(base))) == new.tobytes()


@pytest.mark.parametrize("gap", [SKIP - 1, SKIP, SKIP + 1, 2 * SKIP, 3 * SKIP + 1])
def test_gaps_around_the_longest_of_one_byte_are_decoded(gap: int) -> None:
    base, new = np.zeros(N, np.uint8), np.zeros(N, np.uint8)
    new[[0, 1 + gap, N - 1]] = 1
    bucket, message = both(base, new, 1)
    assert bytes(decode(bucket, message, bytearray(base))) == new.tobytes()


@given(data=st.binary(max_size=40), changed=st.integers(0, 12), itemsize=st.sampled_from([1, 2, 4]))
def test_a_message_that_was_not_made_by_encode_is_refused(data: bytes, changed: int, itemsize: int) -> None:
    base = bytes(range(16))
    bucket = bucket_of(2, 0, 0, np.zeros(16, np.uint8))._replace(base=1, changed=changed, itemsize=itemsize, checksum=1)
    with pytest.raises(ValueError, match=r"checksum|names other elements"):
        decode(bucket, data, bytearray(base))


def test_much_that_changed_travels_as_it_is_and_its_share_is_still_measured() -> None:
    base = np.zeros(2 * N, np.uint8)
    new = base.copy()
    new.view("u2")[: int(MAX_CHANGED * N) + 1] = 1
    bucket, message = both(base, new, 2)
    assert (bucket.base, bucket.changed) == (None, int(MAX_CHANGED * N) + 1)
    assert message is new


def published(version: int, weights: dict[str, torch.Tensor], rank: PartBuffers | None = None) -> PartBuffers:
    """The only rank after this version, the same as before if there is one."""
    rank = rank or PartBuffers(delta=True)
    rank.copy(version, all_rows(weights), next(iter(weights.values())).dtype)
    return rank


def test_an_image_that_takes_changes_step_after_step_equals_one_that_takes_all() -> None:
    torch.manual_seed(0)
    weights = {f"layers.{n}.weight": torch.randn(40 + n, 50).bfloat16() for n in range(4)}
    weights["norm.weight"] = torch.ones(3, dtype=torch.bfloat16)
    rank = published(1, weights)
    image = Image([rank.part])
    for version in range(2, 7):
        changes = take(image, rank)
        weights = {name: tensor + (torch.rand(tensor.shape) < 0.02) for name, tensor in weights.items()}
        published(version, weights, rank)
    whole = Image([rank.part])
    changes, everything = take(image, rank), take(whole, published(9, weights))
    assert content(image) == content(whole)
    assert [bucket.checksum for bucket in changes] == [bucket.checksum for bucket in everything]
    assert sum(bucket.message_bytes for bucket in changes) < 0.1 * rank.part.n_bytes
    image.close()
    whole.close()


def test_a_rank_gives_out_its_newest_version_only_and_without_delta_always_all_of_it() -> None:
    weights = {"w": torch.eye(64)}
    for rank in (PartBuffers(), published(1, weights)):
        for version in (1, 2):
            published(version, weights, rank)
            (bucket, message), *_ = [rank.bucket(version, 0, 1024, whole=False) or (None, None)]
            assert bucket is not None and message is not None
        assert (len(message) == 1024) == (bucket.changed is None)
        assert rank.bucket(1, 0, 1024, whole=False) is None


def test_an_image_that_missed_a_version_or_took_half_of_it_takes_the_next_one_all_the_same() -> None:
    torch.manual_seed(1)
    weights = {"w": torch.randn(64, 64).bfloat16()}
    rank = published(1, weights)
    images = behind, half, whole = [Image([rank.part]) for _ in range(3)]
    for image in images:
        take(image, rank)
    for version in (2, 3):
        weights = {"w": weights["w"].clone()}
        weights["w"][version, ::7] += 1
        published(version, weights, rank)
        if version == 2:
            take(whole, rank)  # so that the next version has each bucket as its base
            half.write(*given_by(rank, 0, 1024))
    for image in images:
        take(image, rank)
    assert content(behind) == content(half) == content(whole)
    for image in images:
        image.close()


def test_at_the_learning_rate_of_rl_a_tenth_of_the_bytes_of_bfloat16_weights_travels() -> None:
    torch.manual_seed(0)
    master = torch.nn.Parameter(0.02 * torch.randn(512, 512))
    optimizer = torch.optim.AdamW([master], lr=1e-6, weight_decay=0.0)
    rank = published(1, {"w": master.detach().bfloat16()})
    image = Image([rank.part])
    for version in range(1, 6):
        published(version, {"w": master.detach().bfloat16()}, rank)
        buckets = take(image, rank, 1 << 20)
        if version > 1:
            sent = sum(bucket.message_bytes for bucket in buckets)
            assert 0 < sent < 0.1 * rank.part.n_bytes, f"version {version}"
        master.grad = torch.randn_like(master)
        before = master.detach().bfloat16()
        optimizer.step()
    whole = Image([rank.part])
    take(whole, published(9, {"w": before}))
    assert content(image) == content(whole)
    image.close()
    whole.close()
