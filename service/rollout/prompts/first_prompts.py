"""Whether first prompts fit into `generator.max_input_length`; a trajectory whose first prompt does not has no turn.

Before a run this is known only of environments whose `reset`, by its source, returns the row's prompt as it is: a call
of `reset` may start servers.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent

from service.config import DataConfig, EnvConfig, GeneratorConfig, ModelConfig
from service.config.model_folder import is_model_folder
from service.errors import UserError
from service.rollout.chat.chat import Chat, load_chat
from service.rollout.chat.special_tokens import MessagesRefused
from service.rollout.chat.tokenizer import make_tokenizer
from service.rollout.environment import Task
from service.rollout.environments.registry import environment_class, synthetic_data
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.mixture import train_file

LOOKED_AT = 200
"""Maximum number of rows whose prompts are tokenized."""


def notes_of_prompts(
    model: ModelConfig, data: DataConfig, env: EnvConfig, generator: GeneratorConfig, seed: int
) -> list[str]:
    """The lines of `too_long` for a configuration; none if its rows or its tokenizer are not on this machine.

    Raises:
        UserError: no row's first prompt fits.
    """
    files = [path for path in (data.train, *(part.path for part in data.mixture.values())) if path is not None]
    if not all(path.exists() for path in files) or not (model.make or (model.path and is_model_folder(model.path))):
        return []
    few = data.make_rows and data.model_copy(update={"make_rows": min(data.make_rows, LOOKED_AT)})
    with TemporaryDirectory() as made:
        folder = model.path or Path(made)
        if model.path is None:
            make_tokenizer(
                folder, synthetic_data(env.name, env.options, env.trusted_modules, "vocabulary").vocabulary()
            )
        path = train_file(few or data, env, Path(made), seed)
        return too_long(env, generator, load_tasks(path), path, load_chat(folder, generator))


def too_long(env: EnvConfig, generator: GeneratorConfig, tasks: Sequence[Task], path: Path, chat: Chat) -> list[str]:
    """A line that says how many rows' first prompts are too long; none if all fit.

    Raises:
        UserError: no row's first prompt fits.
    """
    looked_at = range(0, len(tasks), -(-len(tasks) // LOOKED_AT))
    lengths = {row: length for row in looked_at if (length := _first_length(env, tasks[row], chat))}
    most = generator.max_input_length
    long = [row for row, length in lengths.items() if length > most]
    if not long:
        return []
    of = f"of {len(looked_at)} rows looked at"
    if len(long) == len(looked_at):
        shortest = min(long, key=lengths.__getitem__)
        raise UserError(
            f"generator.max_input_length: it is {most}, and the shortest first prompt of {path.name} has "
            f"{lengths[shortest]} tokens (row {shortest}, {of}); raise it"
        )
    return [
        f"generator.max_input_length: it is {most}, and the first prompts of {len(long)} {of} of {path.name} are "
        f"longer (row {long[0]} has {lengths[long[0]]} tokens): their trajectories have no turn; raise it, or leave "
        "such rows out"
    ]


def _first_length(env: EnvConfig, task: Task, chat: Chat) -> int | None:
    """Number of tokens of the first prompt; None if only the environment knows it, or the template refuses it."""
    if not _gives_the_row(task.env_class or env.name, env.trusted_modules):
        return None
    try:
        return len(chat.prompt(task.prompt, task.tools))
    except MessagesRefused:
        return None


def _gives_the_row(name: str, trusted_modules: Sequence[str]) -> bool:
    """Whether all that the environment's `reset` returns is the prompt of its task."""
    try:
        reset = environment_class(name, trusted_modules).reset  # type: ignore[attr-defined]
        task = list(inspect.signature(reset).parameters)[1]
        nodes = list(ast.walk(ast.parse(dedent(inspect.getsource(reset)))))
    except (UserError, AttributeError, IndexError, OSError, TypeError, ValueError, SyntaxError):
        return False  # an agent, a function that makes an environment, or a class without its source
    returned = {ast.unparse(node) for node in nodes if isinstance(node, ast.Return)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return returned == {f"return {task}.prompt"} and task not in stored
