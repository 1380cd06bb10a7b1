"""Makes and prints the plan of a configuration."""

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
from service.config.paths import is_on_hub
from service.config.section import MODEL_FOLDER
from service.errors import UserError
from service.learn.estimate.kv_cache import check_engine
from service.learn.model.hf_config import read_config
from service.model_folder import MODEL_CONFIG, is_model_folder
from service.plan.forecast import Plan
from service.plan.machine.device import MEASURED, Device, profile
from service.plan.page import as_dict, lines
from service.plan.settings import PlanSettings
from service.plan.work import OPTIONS, work_of
from service.run.folder import run_folder
from service.run.hub import download
from service.run.inputs import make_policy

MODEL = "model"
"""Name of the folder in a run folder that holds the model which the run made."""

_say = partial(print, file=sys.stderr, flush=True)


def print_plan(
    settings: PlanSettings, folder: Path, arguments: argparse.Namespace, measured: Mapping[str, tuple[float, str]]
) -> bool:
    """Print the plan; `measured`: figures of a run, each with its source. Returns whether the configuration fits."""
    device = named(arguments.gpu)
    work = work_of(settings, measured, {name: getattr(arguments, name) for name in OPTIONS})
    check_engine(read_config(folder), settings.generator, settings.fit.learn.model.dtype)
    plan = Plan(settings, folder, device, work, arguments.gpus)
    print(json.dumps(as_dict(plan), indent=2) if arguments.json else "\n".join(lines(plan)))
    return plan.problem is None


@contextmanager
def planned_model(model: ModelConfig, env: EnvConfig, seed: int, run: str | None = None) -> Iterator[Path]:
    """Yield a folder with the model's config.json: the folder `model.path`, the model that a run made, or a new model
    made for `model.make`. If `model.path` names a model on a hub, only the config.json is downloaded.

    Raises:
        UserError: the configuration names no model, or `model.path` has no config.json.
    """
    path = model.path
    if path is not None and is_on_hub(path):
        path, _ = download(
            "model.path", MODEL_FOLDER, str(path), constants.HF_HUB_OFFLINE, _say, model_files=[MODEL_CONFIG]
        )
    if path is None and run is not None and is_model_folder(run_folder(run) / MODEL):
        path = run_folder(run) / MODEL
    if path is not None and not is_model_folder(path):
        raise UserError(f"model.path: {path} has no {MODEL_CONFIG}; that file alone is enough for a plan")
    with tempfile.TemporaryDirectory() as made:
        yield path or make_policy(model, env, seed, Path(made))


def named(name: str) -> Device:
    """The device with this name; its rates are measured if the name stands for this machine."""
    if name in MEASURED:
        from service.plan.machine.measure import measured

        return measured(cpu=name == "cpu")
    return profile(name)
