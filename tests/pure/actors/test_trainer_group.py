"""Each rank of the trainer gets its part of a mini-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.trainer.group import TrainerGroup
from service.config import Config


def rank_that_keeps(given: list[bytes]) -> Any:
    async def step(batch: bytes) -> str:
        given.append(batch)
        return "report"

    return SimpleNamespace(step=SimpleNamespace(remote=step))


@pytest.mark.asyncio
@pytest.mark.parametrize("parts", [[b"a", b"b", b"c", b"d"], [b"a", b"b"], [b"a"]])
async def test_ranks_that_share_micro_batches_get_the_same_part(parts: list[bytes]) -> None:
    given: list[list[bytes]] = [[] for _ in range(4)]
    assert await TrainerGroup(Config(), [rank_that_keeps(each) for each in given]).step(parts) == "report"
    assert given == [[part] for part in parts for _ in range(4 // len(parts))]
