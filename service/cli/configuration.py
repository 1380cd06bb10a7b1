"""`baton config`: show or check a configuration, or print its schema."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from service.cli.recipes import add_settings
from service.errors import UserError

if TYPE_CHECKING:
    from service.config import Config

ABOUT = "A configuration is YAML files, merged in order, then settings. These actions start nothing."

EXAMPLES = """\
examples:
  baton config validate --config mine.yaml               # a line for each mistake; reads data and model headers
  baton config show --config mine.yaml trainer.lr=1e-4   # the configuration of the run, defaults included
  baton config schema > config.schema.json               # for completion in an editor

exit code of validate: 0 the configuration is fine (files that another machine may have are named if they are missing
here), 2 it is not (a line for each mistake).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `baton config`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    for name, run, summary in (
        ("show", show, "print the resolved configuration as YAML, defaults included"),
        ("validate", validate, "check a configuration, start nothing"),
        ("schema", schema, "print the JSON schema of the configuration"),
    ):
        action = actions.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        action.set_defaults(command=run)
        if run is not schema:
            add_settings(action)


def show(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the resolved configuration."""
    from service.config import load, resolved_yaml
    from service.config.load import no_more_words

    no_more_words(arguments)
    sys.stdout.write(resolved_yaml(load(arguments.config, overrides).config))
    return 0


def validate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Check a configuration and the files that it names. Prints a note if only this machine may lack a file."""
    from service.config.load import checked_config
    from service.rollout.prompts.first_prompts import notes_of_prompts

    config, source = checked_config(arguments, overrides, lambda config: list(chain(*_mistakes(config))))
    mistakes, missing = _mistakes(config)
    with source.named_in_errors():
        if mistakes:
            raise UserError("\n".join([*mistakes, *missing]))
        estimates = _estimates(config)
        at = config.model, config.data, config.env, config.generator, config.run.seed
        prompts = [] if config.agents is not None else notes_of_prompts(*at)
    for line in (*(f"note: {line}" for line in (*missing, *config.notes, *prompts)), *estimates):
        print(line)
    files = ", ".join(str(file) for file in arguments.config)
    print(f"{files}: fine" + (", but it cannot be run here" if missing else ""))
    return 0


def _mistakes(config: Config) -> tuple[list[str], list[str]]:
    """A line for each mistake in settings and in the files that they name, and one for each thing that only this
    machine may lack."""
    from service.config.checks import check
    from service.config.core_settings import advantage_rule
    from service.config.paths import check_paths, with_absolute_paths
    from service.rollout.check_inputs import check_inputs
    from service.rollout.environments.registry import SyntheticFunction
    from service.scorers.user import check_scorers

    model = config.model
    functions: tuple[SyntheticFunction, ...] = () if model.make is None else ("vocabulary",)
    functions += () if model.warm_start is None else ("demonstrations",)
    missing: list[str] = []
    looks: list[Callable[[], object]] = [
        lambda: check(config),
        lambda: missing.extend(check_paths(config, here=False)),
        lambda: check_inputs(config.env, config.data, config.run.seed, config.agents is not None, functions),
        *(partial(check_scorers, {name: scorer}) for name, scorer in config.scorers.items()),
        lambda: advantage_rule(config),
    ]
    if model.make is not None:
        from service.plan.engine import check_engine, made_model

        made = model.make
        looks.append(lambda: check_engine(made_model(made, config.env), config.generator, model.dtype))
    if ":" in config.algorithm.loss:  # the names of built-in losses are known without loading torch
        from service.learn.losses.policy_losses import loss_named

        looks.append(lambda: loss_named(config.algorithm.loss))
    if model.adapter is not None:
        from service.run.preparing.inputs import check_first_adapter

        looks.append(lambda: check_first_adapter(with_absolute_paths(config).model))
    found: list[str] = []
    for look in looks:
        told = {line.partition(": ")[0] for line in found}
        try:
            look()
        except UserError as error:
            found += [line for line in str(error).splitlines() if line.partition(": ")[0] not in told]
    return found, missing


def _estimates(config: Config) -> list[str]:
    """Lines with the GPU, the weights' type and the needed GPU memory, if the model is on this machine. `UserError` if
    the model is too large for known GPUs, the limits of the buffer are too small for it, or no engine can run it."""
    from service.config.checks import check_bytes
    from service.model_folder import is_model_folder
    from service.plan.engine import check_engine

    if config.model.path is None or not is_model_folder(config.model.path):
        return []
    from service.learn.model.hf_config import read_config
    from service.learn.model.router_replay import routing_of_model
    from service.plan.memory import GPUS, FitSettings, fit, known_gpu, refuse_too_large
    from service.run.checkpoints import disk_notes
    from service.run.folder import runs_folder

    model = read_config(config.model.path)
    check_engine(model, config.generator, config.model.dtype)
    check_bytes(config, routing_of_model(model, config.generator.record_experts).token_bytes)
    settings, known = FitSettings.of(config), known_gpu(config.trainer)
    if known is None and config.model.dtype == "float32":
        return ["memory: not computed for a CPU; with trainer.accelerator=H100, the memory of that GPU"]
    named = "H100, because neither trainer.accelerator nor this machine has one", GPUS["h100"].memory
    gpu, gpu_bytes = known or named
    found = refuse_too_large(settings, config.model.path) or fit(settings, config.model.path, gpu_bytes)
    runs = runs_folder(config.run.dir).absolute()
    there = next(folder for folder in (runs, *runs.parents) if folder.is_dir())
    saved = found.size.checkpoint * (config.trainer.checkpoint_every > 0)
    return [
        f"memory: for {gpu_bytes / 1e9:.0f} GB of GPU memory ({gpu}) and {config.model.dtype}; not for a CPU",
        *(f"memory: {line}" for line in found.lines()),
        *(f"note: {note}" for note in (known and found.host_note(),) if note),
        *(f"note: this machine {note}" for note in disk_notes(there, saved)),
        *([f"note: on such a GPU it does not fit: {problem}"] if (problem := found.problem()) else []),
    ]


def schema(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the JSON schema of the configuration."""
    from service.config import Config

    if overrides:
        raise UserError(f"{overrides[0]}: the schema depends on no setting; leave it out")

    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0
