"""The functions of the commands of `baton`; each takes the parsed arguments and the settings, returns the exit code.

A function imports what it needs: `baton status`, which is typed often, loads neither NumPy nor pydantic.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from service.errors import UserError, printable
from service.run.phases import phase

if TYPE_CHECKING:
    from service.config import Config

QUIET_SECONDS = 2.0
"""Seconds of a simulation after which a line says that it goes on."""

PIPED_WIDTH = 200
"""Columns of a table that is not written to a terminal."""


def in_ray(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Dispatch to the commands that import Ray; the only import of `actors` in `service`.

    Raises:
        UserError: another package named `actors` comes before Baton's on the import path.
    """
    found, beside = find_spec("actors"), Path(__file__).parents[2] / "actors" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() != beside.resolve():
        other = "is missing" if found is None else f"is {found.origin or 'a folder without __init__.py'}"
        raise UserError(f"the package actors {other}, not {beside}; take the other one off PYTHONPATH, or uninstall it")
    from actors.driver.commands import COMMANDS

    return COMMANDS[arguments.name](arguments, overrides)


def config_show(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the resolved configuration."""
    from service.config import load, resolved_yaml
    from service.config.command_line import no_more_words

    no_more_words(arguments)
    sys.stdout.write(resolved_yaml(load(arguments.config, overrides).config))
    return 0


def config_validate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Check a configuration and the files that it names; a missing file, which may be another machine's, is a note."""
    from service.config.command_line import checked_config
    from service.config.paths import elsewhere

    config, source = checked_config(arguments, overrides)
    with source.named_in_errors():
        missing = elsewhere(config)
        from service.config.core_settings import estimator_name
        from service.rollout.environments.check_inputs import check_inputs
        from service.scorers.user import check_scorers

        check_inputs(config)
        check_scorers(config.scorers)
        estimator_name(config)
        if ":" in config.algorithm.loss:  # the built-in ones are known without loading torch
            from service.learn.losses.loss import loss_named

            loss_named(config.algorithm.loss)
        if config.model.adapter is not None:
            from service.run.prepare import check_first_adapter

            check_first_adapter(config)
        estimates = _estimates(config)
    for line in (*(f"note: {line}" for line in (*missing, *config.notes)), *estimates):
        print(line)
    files = ", ".join(str(file) for file in arguments.config)
    print(f"{files}: fine" + (", but it cannot be run here" if missing else ""))
    return 0


def _estimates(config: Config) -> list[str]:
    """What the model of a configuration takes of its GPUs; nothing where the model is not here, or no GPU's.

    Raises:
        UserError: it is too large for GPUs whose memory is known, or no engine can be made of it.
    """
    from service.config.model_folder import is_model_folder

    if config.model.path is None or not is_model_folder(config.model.path) or config.model.dtype != "bfloat16":
        return []
    from service.learn.estimate.fit import GPU_BYTES, fit, refuse_too_large
    from service.learn.estimate.kv_cache import check_engine
    from service.learn.model.hf_config import read_config

    check_engine(read_config(config.model.path), config)
    found = refuse_too_large(config, config.model.path) or fit(config, config.model.path, GPU_BYTES["H100"])
    problem = found.problem()
    return [*found.lines(), *([f"note: on a GPU of 80 GB it does not fit: {problem}"] if problem else [])]


def config_schema(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the JSON schema of the configuration."""
    from service.config import Config

    print(json.dumps(Config.model_json_schema(), indent=2))
    return 0


def export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write the adapter of a run, alone or merged into its base."""
    from service.config import load
    from service.config.command_line import no_more_words
    from service.run.eval_target import eval_target
    from service.run.folder import FINAL

    no_more_words(arguments)
    target = eval_target(arguments.path)
    if target.run is None:
        raise UserError(
            f"{arguments.path}: a model of no run; give a run that trains an adapter, or a checkpoint of one"
        )
    config = load(target.settings, overrides).config
    if config.model.lora is None:  # said before torch is loaded
        raise UserError(
            f"{arguments.path}: without model.lora the run trains all weights, so there is no adapter to export; "
            f"its final weights, {target.run / FINAL}, are a Hugging Face folder"
        )
    if arguments.output.exists():
        raise UserError(f"{arguments.output} exists already; give another folder, or delete it")
    with phase("merging the adapter into its base" if arguments.merge else "writing the adapter", after=QUIET_SECONDS):
        from service.run.export import export
        from service.run.prepare import prepare_weights

        manifest = prepare_weights(config, target)
        export(config.model.lora, target, target.begun_with(config), manifest, arguments.output, arguments.merge)
    what = "the base with the adapter's update, in float32" if arguments.merge else "the adapter, in PEFT's form"
    print(f"{arguments.output}: {what}")
    return 0


def simulate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Simulate a configuration."""
    from service.config import load
    from service.config.command_line import no_more_words
    from service.simulate import command as simulation

    no_more_words(arguments)
    preset = [] if arguments.config else simulation.PRESET
    config = load(arguments.config, [*preset, *overrides]).config
    with phase("simulating", partial(print, file=sys.stderr, flush=True), after=QUIET_SECONDS):
        return simulation.run(config, arguments)


def plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Predict memory, speed and waiting of a configuration."""
    from service.config.command_line import checked_config
    from service.plan import command
    from service.trace.lengths import lengths_of_run

    config, source = checked_config(arguments, overrides)
    with source.named_in_errors(), phase("planning", partial(print, file=sys.stderr, flush=True), after=QUIET_SECONDS):
        return command.run(config, arguments, lengths_of_run(arguments.lengths) if arguments.lengths else {})


def status(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print what a run is doing now, or how it ended."""
    from service.cli.status_client import run_status
    from service.cli.status_view import status_lines
    from service.run.folder import newest_run

    status = run_status(arguments.run or str(newest_run()))
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(printable("\n".join(status_lines(status, width))))
    return 0


def scale(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Ask a run for another number of generators."""
    from service.config import load
    from service.run.folder import CONFIG, run_folder
    from service.run.scale import ask_for

    folder = run_folder(arguments.run)
    ask_for(folder, load([folder / CONFIG], []).config, arguments.engines)
    generators = "1 generator" if arguments.engines == 1 else f"{arguments.engines} generators"
    print(f"{folder} is asked for {generators}: see baton status {folder}, and baton logs {folder} driver")
    return 0


def trajectories_list(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print a line for each kept trajectory."""
    from rich.console import Console

    from service.run.trajectories import find_recorded_run, load_records
    from service.trace.terminal import print_list

    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    records = load_records(find_recorded_run(arguments.run))
    print_list(console, records[-arguments.last :], len(records))
    return 0


def trajectories_show(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print one trajectory."""
    from rich.console import Console

    from service.run.trajectories import find_record, find_recorded_run, load_records
    from service.trace.terminal import print_record

    folder = find_recorded_run(arguments.run)
    record = find_record(load_records(folder), arguments.id)
    print_record(Console(), record, *_how_to_show(folder))
    return 0


def trajectories_export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write trajectories as an HTML page."""
    from service.run.trajectories import find_recorded_run, load_records
    from service.trace.page import html_page

    folder = find_recorded_run(arguments.run)
    records = load_records(folder)
    kept, records = len(records), records[-arguments.last :]
    output = arguments.output or folder / "trajectories.html"
    output.write_text(html_page(f"Trajectories of {folder.name}", records, kept, *_how_to_show(folder)), "utf-8")
    print(f"{len(records)} of {kept} kept trajectories written to {output}")
    return 0


def _how_to_show(folder: Path) -> tuple[int, Callable[[Sequence[int]], list[str]]]:
    """A run's staleness bound, and a function from token ids to the text of each token."""
    from service.config import load
    from service.config.model_folder import TOKENIZER, read_tokenizer
    from service.run.folder import CONFIG, initial_model
    from service.trace.tokens import pieces

    config = load([folder / CONFIG], []).config
    file = initial_model(config, folder) / TOKENIZER
    if not file.is_file():
        raise UserError(f"{file}: no such file; the run's tokenizer is needed to show its tokens as text")
    tokenizer = read_tokenizer(file)
    return config.buffer.max_staleness, partial(
        pieces, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    )
