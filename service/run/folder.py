"""Makes, finds and locks run folders, `runs/<name>/`. The files of a run folder:

config.yaml         resolved, defaults included
metrics.jsonl       one flat JSON object per optimizer step
tensorboard/        the same numbers
learning_curve.png  reward, staleness, padded length over the steps
trajectories.jsonl  a bounded sample of trajectories
evaluations.jsonl   one JSON object per evaluation and set
timeline/           what every process did when; `baton trace` reads it
profiles/           torch profiles of optimizer steps (`trainer.profile_steps`)
address.json        where the run's metrics service listens
journal/            the buffer's journal
checkpoints/        `step_<n>/`, each with a manifest
warm_start/         with `model.lora`: the warm-started base model to which the adapter is added
final/              the final weights, a Hugging Face folder, or the adapter in PEFT's form
logs/               what each part of the run prints: `driver.log`, `generator-0.log`, ...
summary.json        how the run ended
store.json          the id of the run, with `run.store`
session_secret      if agents call the policy: the secret from which the keys of their sessions are derived
ended_sessions_0    generator 0's most recently ended sessions, with digests of the request bodies that ended them
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.errors import UserError
from service.files import LOCK, lock_folder, write_atomic

if TYPE_CHECKING:  # `baton status` does not load pydantic
    from service.config import ModelConfig

IN_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the entry point of a Ray job."""

RUNS = Path("runs")
"""The folder in which a run is looked up by its name."""
RUN_HELP = "a run folder, or the name of a run"
NEWEST_HELP = f"{RUN_HELP} (default: the newest run in {RUNS}/)"

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"
TRAJECTORIES_BYTES = 64 << 20
"""From this size in bytes on, nothing is appended to `trajectories.jsonl`."""
EVALUATIONS = "evaluations.jsonl"
CURVE = "learning_curve.png"
TIMELINE = "timeline"
PROFILES = "profiles"
ADDRESS = "address.json"
REVISIONS = "revisions.json"
SUMMARY = "summary.json"
JOURNAL = "journal"
CHECKPOINTS = "checkpoints"
DATA = "data"
MODEL = "model"
WARM_START = "warm_start"
FINAL = "final"
BEST = "best"
LOGS = "logs"
STORE_MARK = "store.json"
TARGETS = ".prometheus"
"""Folder beside the run folders. For each active run, it has a file with Prometheus's scrape targets."""
DRIVER_LOG = "driver.log"

BEGUN = (LOCK, LOGS, JOURNAL, METRICS, TRAJECTORIES, CHECKPOINTS, FINAL, ADDRESS, SUMMARY, TIMELINE)
"""Names of files and folders in a run folder. If a folder has only a configuration and none of these, no run was
started in it."""

LOCK_SECONDS = 1.0
"""Seconds that a run waits for the lock of its folder. (`is_locked` holds the lock for an instant.)"""


def is_run_folder(path: Path) -> bool:
    """True if a path is the folder of a run: it has a configuration file."""
    return (path / CONFIG).is_file()


def find_run(run: str | Path, runs: Path = RUNS) -> Path | None:
    """Find a run folder by its path or by its name in `runs`; None if there is none. A folder with a configuration file
    is found even if no run was started in it. `UserError` if it has a pipe or a device, because these may never end."""
    folder = next((folder for folder in (Path(run), runs / run) if is_run_folder(folder)), None)
    for file in () if folder is None else folder.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise UserError(f"{file}: is a pipe or a device, which no run writes; remove it")
    return folder


def check_begun(folder: Path) -> None:
    """Raises `UserError` if no run was started in this folder; a configuration file alone may be a copy."""
    if not any((folder / name).exists() for name in BEGUN):
        began = sorted((folder / RUNS).glob(f"*/{CONFIG}"))
        where = f"; a run of it is {began[-1].parent}" if began else ""
        raise UserError(f"{folder}: there is a {CONFIG}, but no run was started in this folder{where}")


def count(text: str) -> int:
    """Parse an argument such as a number of lines: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number of at least 1")
    return int(text)


def run_folder(run: str | Path | None, runs: Path = RUNS) -> Path:
    """Find a run folder by its path or by its name in `runs`; None: the newest run, by start or resumption. `UserError`
    if there is no such run, or it was never started."""
    if run is None:
        begun = [(file.stat().st_mtime_ns, file.parent) for file in runs.glob(f"*/{CONFIG}")]
        if not begun:
            raise UserError(f"there is no run in {runs}/; give the run's folder or address")
        return max(begun)[1]
    if (folder := find_run(run, runs)) is None:
        raise no_such_run(run, runs)
    check_begun(folder)
    return folder


def no_such_run(run: str | Path, runs: Path = RUNS, besides: str = "") -> UserError:
    """The error for a word that names no run, by folder or name. `besides`: the other words that the command accepts,
    as in "a URL, "."""
    near = difflib.get_close_matches(Path(run).name, [file.parent.name for file in runs.glob(f"*/{CONFIG}")], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if ":/" in str(run):
        hint = "; only `baton run --resume` reads a run from a store"
    return UserError(f"{run}: neither {besides}a run folder (with {CONFIG}) nor the name of a run in {runs}/{hint}")


def runs_folder(directory: Path) -> Path:
    """The folder that contains the run folders: `directory`. In a Ray job, a relative `directory` begins at the home
    folder, because the job's current folder is a temporary copy."""
    return Path.home() / directory if IN_RAY_JOB in os.environ else directory


def new_run_folder(parent: Path, name: str) -> Path:
    """Make the folder `parent/name`, or, if it exists, `parent/name-2`, `parent/name-3` and so on. `UserError` if no
    folder can be made."""
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            folder = Path(parent) / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
                return folder.resolve()
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"run.dir: cannot make a run folder in {str(parent)!a:.100}: {reason}") from None
    raise UserError(f"run.dir: {parent} has thousands of runs named {name}; choose another run.name")


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Within the block, hold the lock of a run folder, so that only one process runs the run. `UserError` if another
    process holds it."""
    try:
        lock = lock_folder(folder, LOCK_SECONDS)
    except TimeoutError:
        raise UserError(f"{folder}: a run is going on in this folder; stop it first") from None
    with lock:
        yield


def initial_model(model: ModelConfig, run: Path) -> Path:
    """The Hugging Face folder of a run's initial model: `model.path`, or the model that the run made."""
    return model.path or run / MODEL


def warmed_model(model: ModelConfig, run: Path) -> Path | None:
    """The Hugging Face folder of the warm-started model, if the run then trains an adapter on top of this model. None
    for all other runs."""
    return run / WARM_START if model.lora is not None and model.warm_start is not None else None


def write_address(folder: Path, url: str) -> None:
    """Write to the run's folder the address at which the run serves /metrics and /status."""
    write_atomic(folder / ADDRESS, json.dumps({"url": url}) + "\n")


def read_address(folder: Path) -> str:
    """The address at which a run serves /metrics and /status, or last served them. For a damaged file it raises
    OSError, ValueError, TypeError, KeyError or RecursionError."""
    return str(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))["url"])


def refuse_larger(files: Sequence[Path], most: int) -> None:
    """Raises `UserError` if files together have more than `most` bytes: no run writes so much, and they would be read
    as a whole."""
    if (size := sum(file.stat().st_size for file in files)) > most:
        raise UserError(f"{files[0].parent}: its files have {size:,} bytes, but no run writes more than {most:,}")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file. Skips an incomplete last line, which a killed writer leaves."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for text in file:
            if not text.endswith("\n"):
                return
            yield json.loads(text)
