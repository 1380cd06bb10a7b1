"""Bytes of weights on their way into a node's image: bucket by bucket as they were sent, and no descriptor is left."""

import asyncio
import gc
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file

from actors.driver.node_check import RunFiles
from actors.weights import image as image_module
from actors.weights.image import ImageHolder
from actors.weights.memory import NO_VERSION, OpenMemory, WeightMemory
from actors.weights.policy_tensors import PolicySize
from actors.weights.pulled import WeightFile
from service.errors import WeightsGone
from service.model_folder import INDEX
from tests.pure.actors.fakes import at, bucket_of, content, file_at, image_of

EMBEDDING = torch.arange(12.0).view(4, 3)
UNTIED = {"model.embed_tokens.weight": EMBEDDING, "model.norm.weight": torch.ones(3)}
WITH_HEAD = UNTIED | {"lm_head.weight": EMBEDDING.clone()}
UNTIED_SIZE = PolicySize(15, tied=False)


def read(image: WeightMemory) -> WeightFile:
    """The file as an engine opens it."""
    return WeightFile(0, at(image.path, image.n_bytes))


def take(data: bytes, size: PolicySize = UNTIED_SIZE) -> None:
    """Let an engine find out whether these are the weights of its policy, after the image is given back."""
    image = image_of(data)
    file = read(image)
    image.close()
    size.check((name, stored.shape) for name, stored in file.stored().items())


def descriptors() -> int:
    gc.collect()  # memory of other tests
    return len(os.listdir("/proc/self/fd"))


def octets(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint8)


async def test_an_image_has_its_version_from_its_last_bucket_on_and_a_spoilt_or_repeated_one_changes_nothing() -> None:
    holder = ImageHolder()
    path = await holder.hold_image(7, 6)
    memory = OpenMemory(path)
    for start in (4, 2, 2, 0):
        assert memory.version(0) == NO_VERSION
        for spoilt in (octets(8, 8), octets(start), octets(start, start + 1, 9)):
            with pytest.raises(ValueError, match="have the checksum"):
                await holder.write_image(7, bucket_of(octets(start, start + 1), start), spoilt)
        await holder.write_image(7, bucket_of(octets(start, start + 1), start), octets(start, start + 1))
    assert memory.version(0) == 7
    await holder.write_image(7, bucket_of(octets(9, 9), 4), octets(9, 9))
    assert [*content(holder._memory)] == [0, 1, 2, 3, 4, 5], "what is whole is not written again"
    assert await holder.hold_image(7, 6) == path and memory.version(0) == 7
    assert await holder.hold_image(8, 6) == path and memory.version(0) == NO_VERSION, "in the same memory"
    with pytest.raises(WeightsGone, match="a newer version"):
        await holder.hold_image(7, 6)
    assert await holder.hold_image(9, 5) != path, "it has another size"


async def test_a_write_that_is_late_for_its_image_does_not_reach_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, holder, verify = threading.Event(), threading.Event(), ImageHolder(), image_module.verify
    older, newer = octets(1, 1), octets(2, 2)

    def late(message: Any, checksum: int) -> Any:
        begun.set()
        assert goes_on.wait(60)
        return verify(message, checksum)

    path = await holder.hold_image(1, 2)
    monkeypatch.setattr(image_module, "verify", late)
    writing = asyncio.ensure_future(holder.write_image(1, bucket_of(older), older))
    await asyncio.to_thread(begun.wait, 60)
    monkeypatch.setattr(image_module, "verify", verify)
    assert await holder.hold_image(2, 2) == path
    await holder.write_image(2, bucket_of(newer), newer)
    goes_on.set()
    with pytest.raises(WeightsGone, match="these weights are not held any more"):
        await writing
    assert content(holder._memory) == newer.tobytes()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_and_counts_with_it_an_untied_one_by_itself(tied: bool) -> None:
    size = PolicySize(15 if tied else 27, tied)
    take(save(WITH_HEAD, metadata={"format": "pt"}), size)
    if tied:
        take(save(UNTIED), size)
    else:
        with pytest.raises(ValueError, match="15 numbers, but the policy has 27"):
            take(save(UNTIED), size)


def test_of_a_policy_in_several_files_all_are_sent_and_none_that_lies_beside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for number, (name, tensor) in enumerate(UNTIED.items()):
        save_file({name: tensor, "not.in.the.index": torch.ones(7)}, tmp_path / f"model-{number}.safetensors")
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(UNTIED)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    save_file(UNTIED, tmp_path / "consolidated.safetensors")
    sizes = RunFiles.of(tmp_path, ()).sizes
    assert {Path(path).name for path in sizes} == {tmp_path.name, "config.json", INDEX, *files.values()}


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x01", b"\xff" * 64, save(UNTIED)[:20], save(UNTIED)[:-1], save(UNTIED) + b"\0"),
        *(len(text).to_bytes(8, "little") + text for text in (b"{", b"{}", b"null", b"[]", b'{"a": 1}', b'{"a":{}}')),
    ],
)
def test_what_is_no_safetensors_file_of_the_policy_is_refused(data: bytes) -> None:
    before = descriptors()
    with pytest.raises(ValueError, match=r"not a safetensors file|but the policy has"):
        take(data)
    assert descriptors() == before


def test_another_image_that_has_the_descriptor_of_one_that_was_given_back_is_not_opened_in_its_place() -> None:
    before, data = descriptors(), save(UNTIED)
    old = image_of(data)
    old.close()
    new = image_of(data)
    assert old.path != new.path and old.path.partition("#")[0] == new.path.partition("#")[0], "the number is free again"
    for path in (old.path, "/proc/1/fd/12345", "/nowhere"):
        with pytest.raises(WeightsGone, match=f"the weights at {path} are gone"):
            WeightFile(0, at(path, 8))
    own = OpenMemory(new.path)
    assert not any(os.get_inheritable(int(file_at(path).name)) for path in (new.path, own.path))
    read(new)
    del own
    new.close()
    assert descriptors() == before
