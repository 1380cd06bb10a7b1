"""Checks whether the prompts of the dataset's rows fit into `generator.max_input_length`. A trajectory whose first
prompt is too long ends without a turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from service.config import GeneratorConfig
from service.rollout.chat.chat import Chat, MessagesRefused
from service.rollout.environment import Task

LOOKED_AT = 200
"""Maximum number of rows whose prompts are checked."""


def too_long(generator: GeneratorConfig, tasks: Sequence[Task], path: Path, chat: Chat) -> list[str]:
    """One line that says how many rows have a too long prompt; no line if all prompts fit.

    A too long prompt is not an error, because an environment may begin with another prompt than the prompt of its row.
    """
    looked_at = range(0, len(tasks), -(-len(tasks) // LOOKED_AT))
    lengths = {row: _length(tasks[row], chat) for row in looked_at}
    most = generator.max_input_length
    long = [row for row, length in lengths.items() if length > most]
    if not long:
        return []
    rows = f"{len(long)} of {len(looked_at)} rows looked at of {path.name}"
    return [
        f"generator.max_input_length: it is {most}, and the prompts of {rows} are longer (row {long[0]} has "
        f"{lengths[long[0]]} tokens): a trajectory that begins with such a prompt has no turn"
    ]


def _length(task: Task, chat: Chat) -> int:
    """Number of tokens of a row's prompt; 0 if the template refuses the prompt."""
    try:
        return len(chat.prompt(task.prompt, task.tools))
    except MessagesRefused:
        return 0
