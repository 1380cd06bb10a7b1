"""Checks the files, folders, programs and modules that a configuration names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any, Literal, NamedTuple, get_args

from service.config.section import HUB, Named, Section
from service.config.tree import Config
from service.errors import UserError
from service.files import is_written_through, matching
from service.model_folder import check_model_folder, is_model_folder
from service.user_code import find_user_module

ADDRESS = re.compile(rf"{HUB}(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[^:]+))?", re.ASCII)
"""Pattern of an address on a model hub."""


class _Problem(NamedTuple):
    line: str
    is_missing: bool = False
    """Whether only this machine lacks it: a file, a program or a module that another machine may have."""


def check_paths(config: Config, here: bool = True) -> list[str]:
    """Raises `UserError` if a file, folder, program, module or package that the configuration needs is missing or of
    the wrong kind, or if the model in `model.path` cannot be trained.

    `here`: whether the run is to be on this machine. If not, a thing that this machine lacks is no error on its own:
    the function returns a line about it."""
    problems = list(_problems(config))
    lines = [problem.line for problem in problems]
    if any(here or not problem.is_missing for problem in problems):
        raise UserError("\n".join(lines))
    return lines


def with_absolute_paths(config: Config) -> Config:
    """The configuration with absolute paths, because other nodes have another current folder. `run.dir` is not
    changed."""
    return config.model_copy(update={name: _with_paths(part, Path.absolute) for name, part in config if name != "run"})


def hub_addresses(config: Config) -> list[tuple[str, Named, Path]]:
    """For each path setting with an address on a model hub: (name of the setting, its mark `Named`, address)."""
    return [found for found in paths(config) if is_on_hub(found[2])]


def with_downloads(config: Config, local: Mapping[Path, Path]) -> Config:
    """The configuration with local paths in place of addresses on a model hub. `local`: for each address, the path to
    which it was downloaded."""
    changed: Config = _with_paths(config, lambda path: local.get(path, path))
    return changed


def is_on_hub(path: Path) -> bool:
    """True if a path is an address on a model hub."""
    return str(path).startswith(HUB)


def _with_paths(value: Any, change: Callable[[Path], Path]) -> Any:
    if isinstance(value, Path):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _with_paths(inner, change) for key, inner in value.items()}
    if not isinstance(value, Section):
        return value
    return value.model_copy(update={name: _with_paths(inner, change) for name, inner in value})


def _problems(config: Config) -> Iterator[_Problem]:
    for setting, named, path in paths(config):
        if is_on_hub(path):  # it is looked up when a run starts
            continue
        wrong = list(_path_problems(setting, named, path))
        yield from wrong
        if setting == "model.path" and not wrong:
            try:
                longest, trainer = config.generator.longest_row, config.trainer
                check_model_folder(path, longest, trainer.sequence_parallel)
            except UserError as error:
                yield _Problem(str(error))
    for setting, command in {"env.command": config.env.command, "env.score": config.env.score}.items():
        # A path with folders begins at the trajectory's folder, if it is not absolute.
        program = command[0] if isinstance(command, tuple) and command else ""
        if program and ("/" not in program or program[0] == "/") and which(program) is None:
            yield _Problem(f"{setting}: there is no program {program!r} on this machine; install it", True)
    yield from _module_problems(config)
    if _kind("run.dir", config.run.dir) == "file":
        yield _Problem(f"run.dir: {config.run.dir} is a file; give a folder")


def paths(value: Any, setting: str = "", marks: Iterable[Any] = ()) -> Iterator[tuple[str, Named, Path]]:
    """For each path in `value` whose setting has the mark `Named`: (name of the setting, mark, path). The mark says
    what the path names."""
    if isinstance(value, Path):
        yield from ((setting, mark, value) for mark in marks if isinstance(mark, Named))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from paths(inner, f"{setting}.{key}", marks)
    elif isinstance(value, Section):
        for name, field in type(value).model_fields.items():
            inner = [*field.metadata, *_marks(field.annotation)]
            yield from paths(getattr(value, name), f"{setting}.{name}".lstrip("."), inner)


def _marks(annotation: Any) -> Iterator[Any]:
    """All annotations in a type, at any depth, such as the mark of `Dataset` in `dict[str, Dataset] | None`."""
    yield from getattr(annotation, "__metadata__", ())
    for inner in get_args(annotation):
        yield from _marks(inner)


def _path_problems(setting: str, named: Named, path: Path) -> Iterator[_Problem]:
    found = matching(path) if named.what == "dataset" else [path]
    kind = _kind(setting, found[0]) if found else None
    if kind is None or kind not in named.kind:
        what = f"is a {kind}" if kind else f"does not exist{_on_hub(named, path)}"
        yield _Problem(f"{setting}: the {named.what} {path} {what}; {named.hint}", kind is None)
    elif named.holds_model and not is_model_folder(path):
        yield _Problem(f"{setting}: the {named.what} {path} has no config.json; {named.hint}")


def _module_problems(config: Config) -> Iterator[_Problem]:
    for setting, value, package in (
        ("metrics.wandb", config.metrics.wandb, "wandb"),
        ("run.store", config.run.store, "obstore"),
    ):
        if value is not None and find_spec(package) is None:
            yield _Problem(
                f"{setting}: the package {package} is not installed; pip install {package}, or remove {setting}"
            )
    uses = {f"scorers.{name}.use": (scorer.use or "").partition(":")[0] for name, scorer in config.scorers.items()}
    own = {f"algorithm.{name}": getattr(config.algorithm, name).rpartition(":")[0] for name in ("estimator", "loss")}
    for setting, module in {**uses, **own}.items():
        package = module.partition(".")[0]
        try:
            wrong = package and not find_user_module(package) and f"there is no module {package!r} on this machine"
        except ImportError as error:
            wrong = str(error)
        if wrong:
            yield _Problem(f"{setting}: {wrong}; install it, or start in its folder")


def _on_hub(named: Named, path: Path) -> str:
    """A note in brackets if a missing path looks like an address on a hub without its prefix; otherwise empty."""
    found = ADDRESS.fullmatch(f"{HUB}{path}")
    form = {"model folder": "", "dataset": ":FILE.parquet"}.get(named.what)
    if found is None or form is None or found["repo"].endswith((".jsonl", ".parquet")):
        return ""
    if path.parts[0].startswith(".") or path.parts[0] in ("data", "models"):
        return ""
    return f" (did you mean {found[0]}{'' if found['file'] else form}?)"


def check_output(file: Path) -> None:
    """Raises `UserError` if a command cannot write its results to the file that `--output` names."""
    if file.is_dir():
        raise UserError(f"--output {file}: is a folder; give a file")
    if not file.parent.is_dir():
        raise UserError(f"--output {file}: there is no folder {file.parent}; make it first")
    if not os.access(file if is_written_through(file) else file.parent, os.W_OK):
        raise UserError(f"--output {file}: cannot be written; give a file that can")


def _kind(setting: str, path: Path) -> Literal["file", "folder", "device or pipe"] | None:
    """The kind of a path; None if the path does not exist."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{setting}: {str(path)!a:.100} cannot be opened: {reason}") from error
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "device or pipe"
