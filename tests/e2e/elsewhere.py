"""An agent whose work goes on in the process of the test, which finds it in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.examples import lookup
from baton.examples.lookup import demonstrations, vocabulary  # noqa: F401 - the module makes the data
from service.files import write_atomic
from service.rollout.environment import AgentSession, Task

SILENCE = 300.0


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """Rows that the configured environment plays."""
    return [row | {"env_class": ""} for row in lookup.rows(n, seed)]


class Elsewhere:
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    async def play(self, session: AgentSession, task: Task, seed: int) -> None:
        name = session.key.partition(".")[0]
        job = {"base_url": session.base_url, "key": session.key, "question": task.prompt[-1]["content"]}
        write_atomic(self.folder / f"{name}.json", json.dumps(job))
        await session.until_finished(SILENCE)

    async def resume(self, session: AgentSession, task: Task, seed: int) -> None:
        (self.folder / "resumed").mkdir(exist_ok=True)
        (self.folder / "resumed" / session.key.partition(".")[0]).touch()
        await self.play(session, task, seed)
