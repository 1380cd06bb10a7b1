"""Checks of the files, folders and modules that a configuration names."""

from __future__ import annotations

import difflib
import stat
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Literal, NamedTuple

from service.config.model_folder import check_model_folder, is_model_folder
from service.config.rollout import RoleConfig
from service.config.tree import Config
from service.errors import UserError
from service.user_code import find_user_module

Kind = Literal["file", "folder"]


class _PathProblem(NamedTuple):
    message: str
    is_missing: bool
    """Nothing lies at the path; it may be a path of another machine."""


def check_paths(config: Config) -> None:
    """Raises `UserError` if a file, folder or module that the configuration names is missing or of the wrong kind."""
    _refuse(_problems(config))


def elsewhere(config: Config) -> list[str]:
    """A line for each file, folder or module that this machine does not have; it may lie on another machine.

    Raises:
        UserError: a file or folder exists and is of the wrong kind or damaged.
    """
    problems = list(_problems(config))
    _refuse(problem for problem in problems if not problem.is_missing)
    return [problem.message for problem in problems]


def with_absolute_paths(config: Config) -> Config:
    """The configuration with every path made absolute, since the actors of other nodes have other current folders."""
    data, agents = config.data, config.agents
    files = ("model", "tokenizer", "key_file")
    scorers = {
        name: scorer.model_copy(update={file: _absolute(getattr(scorer, file)) for file in files})
        for name, scorer in config.scorers.items()
    }
    parts = {name: part.model_copy(update={"path": part.path.absolute()}) for name, part in data.mixture.items()}
    sets = {name: path.absolute() for name, path in data.eval.items()}
    update = {"train": _absolute(data.train), "mixture": parts, "eval": sets}
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"path": _absolute(config.model.path), "adapter": _absolute(config.model.adapter)}
            ),
            "data": data.model_copy(update=update),
            "roles": {
                name: role.model_copy(update={"key_file": _absolute(role.key_file), "model": _model_of(role)})
                for name, role in config.roles.items()
            },
            "agents": agents and agents.model_copy(update={"worker_key_file": _absolute(agents.worker_key_file)}),
            "scorers": scorers,
            "env": config.env.model_copy(update={"workdir": _absolute(config.env.workdir)}),
        }
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _model_of(role: RoleConfig) -> str | None:
    return str(Path(role.model).absolute()) if role.is_served and role.model else role.model


def check_command_paths(config: Config) -> None:
    """Raises `UserError` if the folder or the program of a command that is run as an agent is missing."""
    _refuse(_command_problems(config))


def _refuse(problems: Iterable[_PathProblem]) -> None:
    if lines := [problem.message for problem in problems]:
        raise UserError("\n".join(lines))


def _problems(config: Config) -> Iterator[_PathProblem]:
    if config.model.path is not None:
        yield from _model_problems(config.model.path, config)
    hint = "give a folder with adapter_config.json"
    yield from _path_problems("model.adapter", config.model.adapter, "adapter", "folder", hint)
    data = config.data
    parts = {f"data.mixture.{name}.path": part.path for name, part in data.mixture.items()}
    sets = {f"data.eval.{name}": path for name, path in data.eval.items()}
    for setting, path in {"data.train": data.train, **parts, **sets}.items():
        yield from _path_problems(setting, path, "dataset", "file", "give a JSONL or parquet file")
    yield from _command_problems(config)
    key_file = config.agents.worker_key_file if config.agents is not None else None
    yield from _path_problems("agents.worker_key_file", key_file, "worker key", "file", "give a text file")
    for name, role in config.roles.items():
        yield from _path_problems(f"roles.{name}.key_file", role.key_file, "key", "file", "give a text file")
        own = Path(role.model) if role.is_served and role.model else None
        yield from _model_folder_problems(f"roles.{name}.model", own, "model folder")
    yield from _scorer_problems(config)
    yield from _module_problems(config)
    if _kind("run.dir", config.run.dir) == "file":
        yield _PathProblem(f"run.dir: {config.run.dir} is a file; give a folder", False)


def _model_problems(folder: Path, config: Config) -> Iterator[_PathProblem]:
    wrong = list(_path_problems("model.path", folder, "model folder", "folder", "give a Hugging Face folder"))
    yield from wrong
    if not wrong:
        try:
            longest = config.generator.max_input_length + config.generator.max_generate_length
            check_model_folder(folder, longest, config.trainer.sequence_parallel)
        except UserError as error:
            yield _PathProblem(str(error), False)


def _model_folder_problems(setting: str, folder: Path | None, what: str) -> Iterator[_PathProblem]:
    """Of a model that is not trained."""
    hint = "give a Hugging Face folder"
    wrong = list(_path_problems(setting, folder, what, "folder", hint))
    yield from wrong
    if folder is not None and not wrong and not is_model_folder(folder):
        yield _PathProblem(f"{setting}: the {what} {folder} has no config.json; {hint}", False)


def _command_problems(config: Config) -> Iterator[_PathProblem]:
    env = config.env
    hint = "give a folder of which each trajectory gets a copy, or null"
    yield from _path_problems("env.workdir", env.workdir, "template", "folder", hint)
    for setting, command in {"env.command": env.command, "env.score": env.score}.items():
        # A path is one in the trajectory's folder.
        if isinstance(command, tuple) and command and "/" not in command[0] and which(command[0]) is None:
            yield _PathProblem(f"{setting}: there is no program {command[0]!r} on this machine; install it", True)


def _scorer_problems(config: Config) -> Iterator[_PathProblem]:
    for name, scorer in config.scorers.items():
        path = f"scorers.{name}"
        yield from _model_folder_problems(f"{path}.model", scorer.model, "model folder")
        hint = "give a Hugging Face folder"
        yield from _path_problems(f"{path}.tokenizer", scorer.tokenizer, "tokenizer", "folder", hint)
        yield from _path_problems(f"{path}.key_file", scorer.key_file, "key", "file", "give a text file")
        yield from _user_module_problems(f"{path}.use", (scorer.use or "").partition(":")[0])


def _module_problems(config: Config) -> Iterator[_PathProblem]:
    if config.metrics.wandb is not None and find_spec("wandb") is None:
        message = "metrics.wandb: the package wandb is not installed; install it, or remove metrics.wandb"
        yield _PathProblem(message, False)
    if config.run.store is not None and find_spec("obstore") is None:
        message = "run.store: the package obstore is not installed; pip install obstore, or remove run.store"
        yield _PathProblem(message, False)
    for name in ("estimator", "loss"):
        yield from _user_module_problems(f"algorithm.{name}", getattr(config.algorithm, name).rpartition(":")[0])


def _user_module_problems(setting: str, module: str) -> Iterator[_PathProblem]:
    package = module.partition(".")[0]
    try:
        wrong = package and not find_user_module(package) and f"there is no module {package!r} on this machine"
    except ImportError as error:
        wrong = str(error)
    if wrong:
        yield _PathProblem(f"{setting}: {wrong}; install it, or start in its folder", False)


def _path_problems(setting: str, path: Path | None, what: str, wanted: Kind, hint: str) -> Iterator[_PathProblem]:
    kind = wanted if path is None else _kind(setting, path)
    if path is not None and kind != wanted:
        found = f"is a {kind}" if kind else f"does not exist{near(path)}"
        yield _PathProblem(f"{setting}: the {what} {path} {found}; {hint}", kind is None)


def near(path: Path) -> str:
    """In brackets, the path with the most similar name beside a missing one; empty if there is none."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (there is {path.parent / near[0]})" if near else ""


def _kind(setting: str, path: Path) -> Kind | None:
    """The kind of a path; None: nothing is there."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{setting}: {str(path)!a:.100} cannot be opened: {reason}") from error
    return "folder" if stat.S_ISDIR(mode) else "file"
