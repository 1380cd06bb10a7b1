"""An environment whose prompts grow long while a file is there."""

from collections.abc import Sequence
from pathlib import Path

from baton.examples.lookup import Lookup
from service.rollout.environment import Message, Task

WORDS = 150


class LongPrompts(Lookup):
    """Lookup, with `WORDS` more words before the question as long as `flag` exists."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self._flag = Path(flag)

    async def reset(self, task: Task, seed: int) -> Sequence[Message]:
        first, *others = await super().reset(task, seed)
        more = "none " * WORDS if self._flag.exists() else ""
        return [Message(role=first["role"], content=more + first["content"]), *others]
