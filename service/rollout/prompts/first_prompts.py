"""Checks whether the prompts in a dataset fit into `generator.max_input_length`. A trajectory whose first prompt is too
long ends without a turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from service.config import DataConfig, EnvConfig, GeneratorConfig, ModelConfig
from service.files import matching
from service.model_folder import is_model_folder
from service.rollout.chat.chat import ROLES, Chat, MessagesRefused, load_chat
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
    """Notes about prompts of the configured datasets that are too long. There are none if this machine lacks the rows
    or the tokenizer."""
    paths = (data.train, *(part.path for part in data.mixture.values()))
    files = [file for path in paths if path is not None for file in matching(path)]
    if not all(path.exists() for path in files) or not (model.make or (model.path and is_model_folder(model.path))):
        return []
    few = data.make_rows and data.model_copy(update={"make_rows": min(data.make_rows, LOOKED_AT)})
    with TemporaryDirectory() as made:
        folder = model.path or Path(made)
        if model.path is None:
            words = synthetic_data(env.name, env.trusted_modules, "vocabulary")()
            make_tokenizer(folder, words)
        path = train_file(few or data, env, Path(made), seed)
        return too_long(generator, load_tasks(path), path, load_chat(folder, generator))


def too_long(generator: GeneratorConfig, tasks: Sequence[Task], path: Path, chat: Chat) -> list[str]:
    """Lines that count the prompts that are too long, and the prompts that the chat template refuses; none if all
    prompts fit. Such a prompt is no error, because an environment may begin with another prompt."""
    odd = [row for row, task in enumerate(tasks) if not all(of["role"] in ROLES for of in task.prompt)][:LOOKED_AT]
    looked_at = sorted({*range(0, len(tasks), -(-len(tasks) // LOOKED_AT)), *odd})
    lengths, refused = dict[int, int](), list[str]()
    for row in looked_at:
        try:
            lengths[row] = len(chat.prompt(tasks[row].prompt, tasks[row].tools))
        except MessagesRefused as error:
            refused.append(f"row {row}: {error}")
    most, of = generator.max_input_length, f"of {len(looked_at)} rows looked at of {path.name}"
    long = [f"row {row} has {length} tokens" for row, length in lengths.items() if length > most]
    no_turn = "a trajectory that begins with such a prompt has no turn"
    notes = (
        [f"{path.name}: the prompts of {len(refused)} {of} are refused ({refused[0]}): {no_turn}"] if refused else []
    )
    if long:
        told = f"the prompts of {len(long)} {of} are longer ({long[0]})"
        notes.append(f"generator.max_input_length: it is {most}, and {told}: {no_turn}")
    return notes
