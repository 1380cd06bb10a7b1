"""What the buffer learns of a checkpoint with which a run goes on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from actors.driver.checkpointer import Checkpointer
from service.config import load
from service.handoff.ledger.lifecycle import Fate
from service.run.folder import CHECKPOINTS, CONFIG
from service.run.resuming import resumed
from service.store import fetch
from tests.pure.actors.fakes import Method
from tests.pure.store.memory import MemoryObjects
from tests.pure.store.scripted import ScriptedRun, settings


def test_the_tokens_of_a_restored_run_count_as_trained_although_its_journal_ends_before_that(tmp_path: Path) -> None:
    objects, runs = MemoryObjects(), tmp_path / "second"
    ScriptedRun(tmp_path / "first" / "scripted", settings(tmp_path / "first"), objects).train(4)
    folder = fetch.fetched(objects, lambda file: load([file], [f"run.dir={runs}"]).config, print)
    config = load([folder / CONFIG]).config
    with resumed(config.run, config.trainer, folder) as manifest:
        run = ScriptedRun(folder, config, objects, manifest)
    buffer = run.world.buffer
    assert buffer.ledger.state.fates[Fate.STEPPED] > 0

    def asked(function: Callable[..., Any]) -> Method:
        async def answer(*arguments: Any) -> Any:
            return function(*arguments)

        return Method(answer)

    actor = SimpleNamespace(
        status=asked(lambda: buffer.status().as_dict()), resume=asked(buffer.resume), covered=asked(buffer.covered)
    )
    cluster: Any = SimpleNamespace(buffer=actor, trainer=None)
    assert manifest is not None
    asyncio.run(Checkpointer(config, folder, cluster).resume(manifest))
    assert buffer.ledger.state.fates[Fate.STEPPED] == 0
    shutil.rmtree(folder / CHECKPOINTS)  # a user may, while the run starts: reading the checkpoint names it
    asyncio.run(Checkpointer(config, folder, cluster).resume(manifest))
