"""`baton export`: writes the adapter of a run, alone or merged into its base."""

from __future__ import annotations

import argparse
from pathlib import Path

from service.errors import UserError
from service.run.phases import phase

ABOUT = """\
Write the adapter that a run with model.lora has trained: in PEFT's form, or merged into its base as a Hugging Face
folder in float32. Needs neither Ray nor a GPU.
"""
EXAMPLES = """\
examples:
  baton export runs/gsm8k merged --merge                               # its final adapter, or its newest checkpoint
  baton export runs/gsm8k/checkpoints/step_40 adapter                  # for model.adapter, PEFT or vLLM
"""
QUIET_SECONDS = 2.0
"""Seconds after which a line says what is being done."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = "the run folder of a run with model.lora, or a checkpoint"
    parser.add_argument("path", type=Path, metavar="PATH", help=text)
    parser.add_argument("output", type=Path, metavar="FOLDER", help="the folder to write, which must not exist yet")
    parser.add_argument("--merge", action="store_true", help="write a whole model, which needs no adapter")
    text = "set one value over the run's"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=text)


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
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
    if config.model.lora is None:  # printed before torch is loaded
        raise UserError(
            f"{arguments.path}: without model.lora the run trains all weights, so there is no adapter to export; "
            f"its final weights, {target.run / FINAL}, are a Hugging Face folder"
        )
    if arguments.output.exists():
        raise UserError(f"{arguments.output} exists already; give another folder, or delete it")
    with phase("merging the adapter into its base" if arguments.merge else "writing the adapter", after=QUIET_SECONDS):
        from service.run.export_adapter import export
        from service.run.inputs import prepare_weights

        manifest = prepare_weights(config.model, target)
        export(config.model.lora, target, target.begun_with(config.model), manifest, arguments.output, arguments.merge)
    what = "the base with the adapter's update, in float32" if arguments.merge else "the adapter, in PEFT's form"
    print(f"{arguments.output}: {what}")
    return 0
