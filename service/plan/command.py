"""`baton plan`: whether a configuration fits, its speed and bottleneck, and the best split of the GPUs."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from huggingface_hub import constants

from service.config import EnvConfig, ModelConfig
from service.config.command_line import checked_config
from service.config.model_folder import MODEL_CONFIG, is_model_folder
from service.config.paths import is_on_hub
from service.config.section import MODEL_FOLDER
from service.errors import UserError
from service.learn.estimate.gpus import DATA_SHEETS
from service.learn.estimate.kv_cache import check_engine
from service.learn.model.hf_config import read_config
from service.plan.forecast import forecast
from service.plan.machine.device import Device, profile
from service.plan.page import as_dict, lines
from service.plan.settings import PlanSettings
from service.plan.work import OPTIONS, work_of
from service.run.folder import run_folder
from service.run.hub import download
from service.run.inputs import make_policy
from service.run.lengths import lengths_of_run
from service.run.phases import phase

MODEL = "model"
"""The folder in a run folder of the model that the run made."""

_say = partial(print, file=sys.stderr, flush=True)

MAX_GPUS = 1_000_000
QUIET_SECONDS = 2.0
"""Seconds after which a line says that the plan is being made."""

DOES_NOT_FIT = 3
"""Exit code where the answer is that the configuration does not fit."""

ABOUT = """\
Say what a configuration takes before anything is rented: memory of a rank and of an engine, tokens a second, seconds a
step, who waits for whom, what binds, and the best split of the GPUs. Starts nothing; the model's config.json is enough.
"""

EXAMPLES = f"""\
examples:
  baton plan --config configs/gsm8k.yaml --gpu h100 --gpus 8
  baton plan --config mine.yaml --gpu a100 --gpus 16 --turns 12 --response-tokens 400 --environment-seconds 1.5
  baton plan --config mine.yaml --gpu h200 --lengths runs/pilot        # lengths, turns and times of a run
  baton plan --config configs/quickstart.yaml --gpu measured           # this machine, measured in under 30 s
  baton plan --config mine.yaml --gpu h100 --json

Every figure that nothing says is assumed, and printed with its source.

exit code: 0 it fits, {DOES_NOT_FIT} it does not fit (the page says by how much, and which setting helps), 2 the input
is wrong (one line says what).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments, besides configuration files and settings."""
    names = ", ".join((*DATA_SHEETS, "cpu", "measured"))
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"{names} (default h100)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all (default: as many as are configured)")
    parser.add_argument("--lengths", metavar="RUN", help="take turns, lengths and the environment's time from a run")
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=option.metadata["help"])
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Predict memory, speed and waiting of a configuration; returns the exit code."""
    config, source = checked_config(arguments, overrides)
    with source.named_in_errors(), phase("planning", _say, after=QUIET_SECONDS):
        measured = lengths_of_run(arguments.lengths) if arguments.lengths else {}
        with planned_model(config.model, config.env, config.run.seed, arguments.lengths) as folder:
            return print_plan(PlanSettings.of(config), folder, arguments, measured)


def print_plan(
    settings: PlanSettings, folder: Path, arguments: argparse.Namespace, measured: Mapping[str, tuple[float, str]]
) -> int:
    """Print the plan; `measured`: figures of a run, each with its source. Returns the exit code."""
    if arguments.gpus is not None and not 1 <= arguments.gpus <= MAX_GPUS:
        raise UserError(f"--gpus {arguments.gpus}: give a number from 1 to {MAX_GPUS}")
    device = named(arguments.gpu)
    work = work_of(settings, measured, {name: getattr(arguments, name) for name in OPTIONS})
    check_engine(read_config(folder), settings.generator, settings.fit.learn.model.dtype)
    plan = forecast(settings, folder, device, work, arguments.gpus)
    print(json.dumps(as_dict(plan), indent=2) if arguments.json else "\n".join(lines(plan)))
    return 0 if plan.problem is None else DOES_NOT_FIT


@contextmanager
def planned_model(model: ModelConfig, env: EnvConfig, seed: int, run: str | None = None) -> Iterator[Path]:
    """A folder with the model's config.json: `model.path`, of a hub this file only, the model of a run, or a new one
    for `model.make`.

    Raises:
        UserError: the configuration names no model.
    """
    path = model.path
    if path is not None and is_on_hub(path):
        path = download(
            "model.path", MODEL_FOLDER, str(path), constants.HF_HUB_OFFLINE, _say, model_files=[MODEL_CONFIG]
        ).path
    if path is None and run is not None and is_model_folder(run_folder(run) / MODEL):
        path = run_folder(run) / MODEL
    if path is not None and not is_model_folder(path):
        raise UserError(f"model.path: {path} has no {MODEL_CONFIG}; that file alone is enough for a plan")
    with tempfile.TemporaryDirectory() as made:
        yield path or make_policy(model, env, seed, Path(made))


def named(name: str) -> Device:
    """The device of this name, measured if it is this machine."""
    if name in ("cpu", "measured"):
        from service.plan.machine.measure import measured

        return measured(cpu=name == "cpu")
    return profile(name)
