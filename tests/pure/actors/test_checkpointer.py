"""What the buffer learns of a checkpoint with which a run goes on."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.driver.checkpointer import Checkpointer
from service.config import Config, load
from service.errors import ProcessLost
from service.handoff.ledger.events import Fate
from service.run.folder import CHECKPOINTS, CONFIG
from service.run.preparing.resuming import resumed
from tests.pure.actors.fakes import Method
from tests.pure.store.scripted import ScriptedRun, settings


def test_a_checkpoint_whose_files_are_not_written_is_given_up_also_after_one_that_failed_with_its_files(
    tmp_path: Path,
) -> None:
    """The buffer is lost when it is to be told of the first one, and the ranks before they have written the second."""

    async def lost(*arguments: Any) -> Any:
        raise ProcessLost("the buffer is lost")

    async def nothing(*arguments: Any) -> dict[str, int]:
        return {"journal_synced": 0}

    async def given_up() -> None:
        buffer = SimpleNamespace(status=Method(nothing), covered=Method(lost))
        trainer = SimpleNamespace(save=nothing, finish_save=nothing)
        cluster: Any = SimpleNamespace(buffer=buffer, trainer=trainer)
        checkpointer = Checkpointer(Config(), tmp_path, cluster)
        await checkpointer.begin(1)
        for ended in (checkpointer.settle, checkpointer.abandon):
            with pytest.raises(ProcessLost):
                await ended()
        trainer.finish_save = asyncio.Event().wait
        await checkpointer.begin(2)
        assert not checkpointer.completes
        async with asyncio.timeout(20):
            await checkpointer.abandon()

    asyncio.run(given_up())


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
