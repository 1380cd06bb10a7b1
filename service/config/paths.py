"""Files, folders and modules that a configuration names."""

from __future__ import annotations

import difflib
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from service.config.tree import Config
from service.errors import UserError


def check_paths(config: Config) -> None:
    """Raises `UserError` where a file, folder or module that the configuration names is not there."""
    if config.model.path is not None:
        _check_model(config.model.path)
    data = config.data
    files = {
        "data.train": data.train,
        **{f"data.mixture.{name}.path": part.path for name, part in data.mixture.items()},
    }
    for setting, path in {**files, **{f"data.eval.{name}": path for name, path in data.eval.items()}}.items():
        kind = None if path is None else _kind(setting, path)
        if path is not None and kind != "file":
            found = "is a folder" if kind == "folder" else f"does not exist{_near(path)}"
            raise UserError(f"{setting}: the dataset {path} {found}; give a JSONL or parquet file")
    retrieval = config.env.retrieval
    if retrieval is not None:
        for name, path, wanted in (("corpus", retrieval.corpus, "file"), ("encoder", retrieval.encoder, "folder")):
            setting = f"env.retrieval.{name}"
            if path is not None and _kind(setting, path) != wanted:
                raise UserError(f"{setting}: the {wanted} {path} does not exist")
    if config.metrics.wandb is not None and find_spec("wandb") is None:
        raise UserError("metrics.wandb: the package wandb is not installed; install it, or remove metrics.wandb")
    for name in ("estimator", "loss"):
        package = getattr(config.algorithm, name).rpartition(":")[0].partition(".")[0]
        if package and find_spec(package) is None:
            raise UserError(
                f"algorithm.{name}: there is no module {package!r} on this machine; install it, or put its folder on "
                "PYTHONPATH"
            )
    if _kind("run.dir", config.run.dir) == "file":
        raise UserError(f"run.dir: {config.run.dir} is a file; give a folder")


def _check_model(folder: Path) -> None:
    kind = _kind("model.path", folder)
    if kind != "folder":
        found = "is a file" if kind == "file" else f"does not exist{_near(folder)}"
        raise UserError(f"model.path: the model folder {folder} {found}; give a Hugging Face folder")
    for needed in ("config.json", "tokenizer.json"):
        if _kind("model.path", folder / needed) != "file":
            raise UserError(f"model.path: the model folder {folder} has no {needed}; give a Hugging Face folder")


def _near(path: Path) -> str:
    """What lies beside a missing path under nearly its name."""
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f" (there is {path.parent / near[0]})" if near else ""


def _kind(setting: str, path: Path) -> Literal["file", "folder"] | None:
    """What lies at a path; None: nothing."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{setting}: {str(path)!a:.100} cannot be opened: {reason}") from error
    return "folder" if stat.S_ISDIR(mode) else "file"
