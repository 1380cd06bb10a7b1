"""The command `baton plan`: whether a configuration fits, and how long a step may take with each split of the GPUs."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from service.config import EnvConfig, ModelConfig
from service.config.checks import check_bytes
from service.config.load import checked_config
from service.errors import UserError
from service.handoff.group_bytes import TOKEN_BYTES
from service.model_folder import MODEL_CONFIG, check_description, is_model_folder
from service.plan.engine import check_engine
from service.run.folder import count
from service.run.phases import phase

if TYPE_CHECKING:
    from service.plan.splits import SplitTable

DOES_NOT_FIT = 3
"""Exit code if the configuration does not fit into memory."""
ABOUT = "Say whether a configuration fits, and how long a step may take. Starts nothing; a config.json is enough."
EXAMPLES = f"""\
examples:
  baton plan --config configs/gsm8k.yaml --gpu h100 --gpus 8
  baton plan --config mine.yaml --gpu a100 --gpus 16 --turns 12 --response-tokens 400

exit code: 0 it fits, {DOES_NOT_FIT} it does not fit (the output says by how much, and which setting helps), 2 the input
is wrong (one line says what).
"""
LENGTHS = {
    "turns": "turns of a trajectory (default: half of env.max_turns)",
    "prompt-tokens": "tokens of the first prompt (default: a quarter of generator.max_input_length)",
    "response-tokens": "sampled tokens of a turn (default: half of generator.max_generate_length)",
    "observation-tokens": "tokens between two turns (default: as many as a turn samples)",
}
"""Options that give the mean trajectory, with their help."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments, in addition to configuration files and settings."""
    parser.add_argument("--gpu", default="h100", metavar="NAME", help="h100 (default), h200, h20, a100, l40s or b200")
    parser.add_argument("--gpus", type=count, metavar="N", help="GPUs in all (default: as many as are configured)")
    for name, meaning in LENGTHS.items():
        parser.add_argument(f"--{name}", type=_number, metavar="X", help=meaning)


def _number(text: str) -> float:
    if not 1 <= (number := float(text)) <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number from 1 to 1,000,000")
    return number


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Print the plan of a configuration; returns the exit code."""
    config, source = checked_config(arguments, overrides)
    with phase("loading PyTorch", _say):
        from service.learn.model.hf_config import read_config
        from service.learn.model.router_replay import routing_of_model
        from service.plan.memory import GPUS, GPUS_OF_A_NODE, FitSettings
        from service.plan.splits import SplitTable, Work

    if arguments.gpu not in GPUS:
        raise UserError(f"--gpu {arguments.gpu}: known are {', '.join(GPUS)}")
    generator, given = config.generator, [getattr(arguments, name.replace("-", "_")) for name in LENGTHS]
    sampled = arguments.response_tokens or generator.max_generate_length / 2
    assumed = (config.env.max_turns + 1) / 2, generator.max_input_length / 4, sampled, sampled
    work = Work(*(length or default for length, default in zip(given, assumed, strict=True)))
    with source.named_in_errors(), planned_model(config.model, config.env, config.run.seed) as folder:
        check_description(folder, generator.longest_row, config.trainer.sequence_parallel)
        model = read_config(folder)
        routed = routing_of_model(model, generator.record_experts).token_bytes
        check_bytes(config, routed)
        check_engine(model, generator, config.model.dtype)
        table = SplitTable(FitSettings.of(config), config.buffer, folder, GPUS[arguments.gpu], work)
    used, problem = table.settings.gpus, table.fit.problem()
    gpus = arguments.gpus or used
    if generator.engine_gpus > GPUS_OF_A_NODE:
        of_node = f"an engine takes {generator.engine_gpus} GPUs of a node, which has {GPUS_OF_A_NODE}; use fewer"
        raise UserError(f"generator.tensor_parallel_size: {of_node}")
    if used > gpus:
        problem = f"generator.engines: engines and ranks take {used} GPUs, more than --gpus {gpus}; see the table"
    print(f"{config.run.name} on {gpus} {arguments.gpu}")
    print("\n".join(_lines(table, problem, routed, gpus, [length is None for length in given])))
    return 0 if problem is None else DOES_NOT_FIT


@contextmanager
def planned_model(model: ModelConfig, env: EnvConfig, seed: int) -> Iterator[Path]:
    """Yield a folder with the model's config.json: `model.path`, or a new one made for `model.make`; `UserError` if
    there is none."""
    from service.run.preparing.inputs import make_policy

    if model.path is not None and not is_model_folder(model.path):
        raise UserError(f"model.path: {model.path} is no folder with {MODEL_CONFIG}, which is enough (docs/plan.md)")
    with tempfile.TemporaryDirectory() as made:
        yield model.path or make_policy(model, env, seed, Path(made))


def _lines(table: SplitTable, problem: str | None, routed: int, gpus: int, assumed: list[bool]) -> Iterator[str]:
    yield from table.fit.lines()
    work, trajectories = table.work, table.trajectories
    yield "it fits" if problem is None else f"it does not fit: {problem}"
    tokens, sampled = trajectories * work.length, trajectories * work.sampled
    each = zip(work._fields, work, assumed, strict=True)
    named = [f"{name} {value:g}{' (assumed)' * guess}" for name, value, guess in each]
    lengths = ", ".join(named if work.turns > 1 else named[:-1])  # one turn has no observation
    yield f"a step: {trajectories} trajectories, {tokens:,.0f} tokens, {sampled:,.0f} sampled (of each: {lengths})"
    yield (
        f"journal: {_gb(tokens * (TOKEN_BYTES + routed))} GB a step; a checkpoint: "
        f"{_gb(table.fit.size.checkpoint)} GB; a weight update: {_gb(table.fit.host['final weights'])} GB"
    )
    yield f"\n  {'engines':>8} {'ranks':>6} {'training s':>14} {'decoding s':>14} {'step s':>14} {'rank GB':>8}  fits"
    splits, configured = table.splits(gpus), (table.settings.generator.max_engines, table.settings.learn.trainer.ranks)
    best = min(splits, key=lambda split: (not split.fits, split.step.slow))
    for split in splits:
        ranges = (f"{low:.3g}-{high:.3g}" for low, high in (split.training, split.decoding, split.step))
        here = "  (configured)" if (split.engines, split.ranks) == configured else ""
        numbers = f"{split.engines:>8} {split.ranks:>6} " + " ".join(f"{each:>14}" for each in ranges)
        numbers += f" {split.rank / 1e9:>8.1f}"
        yield f"{'*' if split is best else ' '} {numbers}  {'yes' if split.fits else 'no '}{here}"
    yield "* the shortest step; the seconds are a range of arithmetic, without the environment's (docs/plan.md)"


def _gb(n_bytes: float) -> str:
    """A size in GB, with two significant digits however small or large it is."""
    return f"{float(f'{n_bytes / 1e9:.2g}'):,g}"
