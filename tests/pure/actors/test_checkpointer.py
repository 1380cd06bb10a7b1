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
from service.handoff.ledger.events import Fate
from service.run.folder import CHECKPOINTS, CONFIG
from service.run.preparing.resuming import resumed
from tests.pure.actors.fakes import Method
from tests.pure.store.scripted import ScriptedRun, settings


def test_the_tokens_of_a_run_that_was_killed_before_the_buffer_knew_of_its_checkpoint_count_as_trained(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "scripted"
    killed = ScriptedRun(folder, settings(tmp_path), None)
    killed.world.buffer.covered = lambda step, oldest_kept: None  # type: ignore[method-assign]
    killed.train(4)
    killed.world.journal.close()
    config = load([folder / CONFIG]).config
    with resumed(config.run, config.trainer, folder) as manifest:
        run = ScriptedRun(folder, config, None, manifest)
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
