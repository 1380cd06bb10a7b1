"""The command `baton plan`: shows whether a configuration fits into memory, its speed, its bottleneck, and the best
split of the GPUs."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from service.config.checks import check_bytes
from service.config.command_line import checked_config
from service.errors import UserError
from service.learn.estimate.gpus import DATA_SHEETS
from service.model_folder import TOKENIZER, check_description
from service.plan.machine.device import MEASURED, profile
from service.plan.work import OPTIONS, check_bounds
from service.run.lengths import lengths_of_run
from service.run.phases import phase

MAX_GPUS = 1_000_000
QUIET_SECONDS = 2.0
"""Seconds after which a line tells the user that the plan is being made."""

DOES_NOT_FIT = 3
"""Exit code if the configuration does not fit into memory."""

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

exit code: 0 it fits, {DOES_NOT_FIT} it does not fit (the output says by how much, and which setting helps), 2 the input
is wrong (one line says what).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments, in addition to configuration files and settings."""
    names = ", ".join((*DATA_SHEETS, *MEASURED))
    parser.add_argument("--gpu", default="h100", metavar="NAME", help=f"{names} (default h100)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs in all (default: as many as are configured)")
    parser.add_argument("--lengths", metavar="RUN", help="take turns, lengths and the environment's time from a run")
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=option.metadata["help"])
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Predict memory, speed and waiting of a configuration; returns the exit code."""
    _check_arguments(arguments)
    config, source = checked_config(arguments, overrides)
    say = partial(print, file=sys.stderr, flush=True)
    with phase("loading PyTorch", say):
        from service.learn.model.hf_config import read_config
        from service.learn.model.router_replay import routing_of_model
        from service.plan.planning import planned_model, print_plan
        from service.plan.settings import PlanSettings

    with source.named_in_errors(), phase("planning", say, after=QUIET_SECONDS):
        measured = lengths_of_run(arguments.lengths) if arguments.lengths else {}
        with planned_model(config.model, config.env, config.run.seed, arguments.lengths) as folder:
            trainer = config.trainer
            check_description(folder, config.generator.longest_row, trainer.sequence_parallel)
            check_bytes(config, routing_of_model(read_config(folder), config.generator.record_experts).token_bytes)
            if not (folder / TOKENIZER).is_file():
                say(f"note: {folder} has no {TOKENIZER}: a run, and its check, need a whole Hugging Face folder")
            return 0 if print_plan(PlanSettings.of(config), folder, arguments, measured) else DOES_NOT_FIT


def _check_arguments(arguments: argparse.Namespace) -> None:
    """Raise a UserError for wrong arguments, before PyTorch is loaded."""
    if arguments.gpu not in MEASURED:
        profile(arguments.gpu)
    if arguments.gpus is not None and not 1 <= arguments.gpus <= MAX_GPUS:
        raise UserError(f"--gpus {arguments.gpus}: give a number from 1 to {MAX_GPUS}")
    for name in OPTIONS:
        if (value := getattr(arguments, name)) is not None:
            check_bounds(name, value)
