"""Bytes of weights on their way into a node's image: bucket by bucket as they were sent, and no descriptor is left."""

from __future__ import annotations

import gc
import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from actors.weights.image import Image
from actors.weights.memory import NO_VERSION, OpenMemory
from actors.weights.part import Source, WeightPart
from actors.weights.policy_tensors import PolicySize
from actors.weights.pulled import WeightFile
from service.errors import WeightsGone
from tests.pure.actors.fakes import bucket_of, content, image_of

EMBEDDING = torch.arange(12.0).view(4, 3)
UNTIED = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": torch.ones(3)}
WITH_HEAD = UNTIED | {"lm_head.weight": EMBEDDING.clone()}
UNTIED_SIZE = PolicySize(15, tied=False)


def read(image: Image) -> WeightFile:
    """The file as an engine opens it."""
    return WeightFile(0, [Source(WeightPart(((0, len(image._octets)),)), image.path)])


def take(data: bytes, size: PolicySize = UNTIED_SIZE) -> None:
    """Let an engine find out whether these are the weights of its policy, after the image is given back."""
    image = image_of(data)
    with closing(read(image)) as file:
        image.close()
        size.check((name, stored.shape) for name, stored in file.stored().items())


def descriptors() -> int:
    gc.collect()  # memory of other tests
    return len(os.listdir("/proc/self/fd"))


def octets(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint8)


def test_buckets_are_written_in_any_order_and_a_spoilt_one_not_at_all() -> None:
    image = Image(1, 6)
    for start in (4, 2, 0):
        for spoilt in (octets(8, 8), octets(start), octets(start, start + 1, 9)):
            with pytest.raises(ValueError, match="have the checksum"):
                image.write(bucket_of(octets(start, start + 1), start), spoilt)
        image.write(bucket_of(octets(start, start + 1), start), octets(start, start + 1))
    assert [*content(image)] == [0, 1, 2, 3, 4, 5]
    image.close()


def test_an_image_has_its_version_from_its_last_bucket_on() -> None:
    image = Image(7, 6)
    with closing(OpenMemory(image.path)) as memory:
        for start in (0, 2, 0, 0):  # one of them several times
            image.write(bucket_of(octets(1, 2), start), octets(1, 2))
            assert memory.version(0) == NO_VERSION
        image.write(bucket_of(octets(5, 6), 4), octets(5, 6))
        assert memory.version(0) == 7
        image.write(bucket_of(octets(9, 9), 4), octets(9, 9))
        assert [*content(image)] == [1, 2, 1, 2, 5, 6], "what is whole is not written again"
    image.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_and_counts_with_it_an_untied_one_by_itself(tmp_path: Path, tied: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    save_file(WITH_HEAD, tmp_path / "model.safetensors", metadata={"format": "pt"})
    size = PolicySize.of_folder(tmp_path)
    assert size == PolicySize(15 if tied else 27, tied)
    take(save(WITH_HEAD, metadata={"format": "pt"}), size)
    if tied:
        take(save(UNTIED), size)
    else:
        with pytest.raises(ValueError, match="15 numbers, but the policy has 27"):
            take(save(UNTIED), size)


def test_a_policy_in_several_files_is_all_of_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number, (name, tensor) in enumerate(UNTIED.items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
    assert PolicySize.of_folder(tmp_path) == UNTIED_SIZE


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        b"\xff" * 64,
        (9).to_bytes(8, "little") + b"{}",
        save(UNTIED)[:20],
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        (2).to_bytes(8, "little") + b"[]",
        (12).to_bytes(8, "little") + b'{"a": {"b":1',
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (8).to_bytes(8, "little") + b'{"a":{}}',
    ],
)
def test_what_is_no_safetensors_file_is_refused_with_its_size(data: bytes) -> None:
    before = descriptors()
    with pytest.raises(ValueError, match=r"not a safetensors file|but the policy has"):
        take(data)
    assert descriptors() == before


def test_a_file_whose_data_were_cut_off_is_refused_though_its_header_is_whole() -> None:
    data = save(UNTIED)
    for cut in (data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="not a safetensors file"):
            take(cut)


def test_another_image_that_has_the_descriptor_of_one_that_was_given_back_is_not_opened_in_its_place() -> None:
    before, data = descriptors(), save(UNTIED)
    old = image_of(data)
    old.close()
    new = image_of(data)
    assert old.path != new.path and old.path.partition("#")[0] == new.path.partition("#")[0], "the number is free again"
    with pytest.raises(WeightsGone, match=f"the weights at {old.path} are gone"):
        read(old)
    read(new).close()
    new.close()
    assert descriptors() == before


@pytest.mark.parametrize("path", ["/proc/1/fd/12345", "/proc/self/fd/12345", "/nowhere"])
def test_a_path_that_leads_nowhere_is_gone(path: str) -> None:
    with pytest.raises(WeightsGone, match=f"the weights at {path} are gone"):
        WeightFile(0, [Source(WeightPart(((0, 8),)), path)])
