"""Bytes of weights on their way into a file in memory: all of them or none, and no descriptor is left."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from actors.weights import shared_memory_file
from actors.weights.checksum import PolicySize, checksum_of
from actors.weights.shared_memory_file import open_shared_memory_file, write_shared_memory_file
from service.errors import WeightsGone

EMBEDDING = torch.arange(12.0).view(4, 3)
UNTIED = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": torch.ones(3)}
WITH_HEAD = UNTIED | {"lm_head.weight": EMBEDDING.clone()}
UNTIED_SIZE = PolicySize(15, tied=False)


def taken(data: bytes, size: PolicySize = UNTIED_SIZE) -> int:
    return write_shared_memory_file(data, checksum_of(data), size)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_every_byte_arrives_though_the_system_takes_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data, write = save(UNTIED), os.write
    monkeypatch.setattr(shared_memory_file.os, "write", lambda fd, view: write(fd, view[:7]))
    fd = taken(data)
    assert os.pread(fd, len(data) + 1, 0) == data
    os.close(fd)


def test_memory_that_runs_out_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, view: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory_file.os, "write", full)
    before = descriptors()
    with pytest.raises(OSError, match="No space left"):
        taken(save(UNTIED))
    assert descriptors() == before


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_and_counts_with_it_an_untied_one_by_itself(tmp_path: Path, tied: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    save_file(WITH_HEAD, tmp_path / "model.safetensors", metadata={"format": "pt"})
    size = PolicySize.of_folder(tmp_path)
    assert size == PolicySize(15 if tied else 27, tied)
    os.close(taken(save(WITH_HEAD, metadata={"format": "pt"}), size))
    if tied:
        os.close(taken(save(UNTIED), size))
    else:
        with pytest.raises(ValueError, match="15 numbers, but the policy has 27"):
            taken(save(UNTIED), size)


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
        taken(data)
    assert descriptors() == before


def test_a_file_whose_data_were_cut_off_is_refused_though_its_header_is_whole() -> None:
    data = save(UNTIED)
    for cut in (data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match="not a safetensors file"):
            taken(cut)


@pytest.mark.parametrize("path", ["/proc/1/fd/12345", "/proc/self/fd/12345", "/nowhere"])
def test_a_path_that_leads_nowhere_is_gone(path: str) -> None:
    with pytest.raises(WeightsGone, match=f"the weights at {path} are gone"):
        open_shared_memory_file(path)
