"""Checks whether the prompts of the dataset's rows fit into `generator.max_input_length`. A trajectory whose first
prompt is too long ends without a turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from service.config import DataConfig, EnvConfig, GeneratorConfig, ModelConfig
from service.files import matching
from service.model_folder import is_model_folder
from service.rollout.chat.chat import Chat, MessagesRefused, load_chat
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.environment import Task
from service.rollout.environments.registry import synthetic_data
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.files import train_file

LOOKED_AT = 200
"""Maximum number of rows whose prompts are checked."""


def notes_of_prompts(
    model: ModelConfig, data: DataConfig, env: EnvConfig, generator: GeneratorConfig, seed: int
) -> list[str]:
    """Notes about too long prompts in a configuration's datasets; no notes if the rows or the tokenizer are not on this
    machine."""
    paths = (data.train, *(part.path for part in data.mixture.values()))
    files = [file for path in paths if path is not None for file in matching(path)]
    if not all(path.exists() for path in files) or not (model.make or (model.path and is_model_folder(model.path))):
        return []
    few = data.make_rows and data.model_copy(update={"make_rows": min(data.make_rows, LOOKED_AT)})
    with TemporaryDirectory() as made:
        folder = model.path or Path(made)
        if model.path is None:
            words = synthetic_data(env.name, env.trusted_modules, "vocabulary").vocabulary()
            make_tokenizer(folder, words)
        path = train_file(few or data, env, Path(made), seed)
        return too_long(generator, load_tasks(path), path, load_chat(folder, generator))


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
