"""`baton export`: writes the weights of a run or of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from service.errors import UserError
from service.run.phases import phase

ABOUT = """\
Write the weights of a run or of a checkpoint as a Hugging Face folder, which transformers and vLLM load. The adapter of
a run with model.lora is merged into its base in float32, or written alone. Needs neither Ray nor a GPU.
"""
EXAMPLES = """\
examples:
  baton export runs/gsm8k/checkpoints/step_40 model                    # the weights after 40 steps
  baton export runs/gsm8k model                                        # its final weights, or its newest checkpoint
  baton export runs/gsm8k adapter --adapter                            # for model.adapter, PEFT or vLLM
"""
QUIET_SECONDS = 2.0
"""Seconds after which a line names the work that is in progress."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", type=Path, metavar="PATH", help="a run folder, or a checkpoint in it")
    parser.add_argument("output", type=Path, metavar="FOLDER", help="the folder to write, which must not exist yet")
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, in PEFT's form")
    text = "set one value over the run's"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=text)


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Write the weights of a run or of a checkpoint."""
    from service.config import load
    from service.config.load import no_more_words
    from service.run.preparing.eval_target import eval_target

    no_more_words(arguments)
    if useless := [override for override in overrides if not override.startswith("model.")]:
        raise UserError(f"{useless[0]}: an export depends on settings of the section model only; leave it out")
    target = eval_target(arguments.path)
    if target.run is None:
        raise UserError(f"{arguments.path}: a model of no run; give a run, or a checkpoint of a run")
    model = load(target.settings, overrides).config.model
    if arguments.adapter and model.lora is None:  # printed before torch is loaded
        raise UserError(
            f"{arguments.path}: without model.lora the run trains all weights, so there is no adapter to export; leave "
            "out --adapter"
        )
    if os.path.lexists(arguments.output):  # also a link without a target
        raise UserError(f"{arguments.output} exists already; give another folder, or delete it")
    with phase("writing the weights", after=QUIET_SECONDS):
        from service.run.preparing.inputs import prepare_weights
        from service.run.preparing.weights_export import export

        manifest = prepare_weights(model, target)
        _refuse_without_effect(overrides, copied=manifest is None, is_adapter=model.lora is not None)
        merged = export(model, target, manifest, arguments.output, merged=not arguments.adapter)
    step = "the final weights" if manifest is None else f"the weights after step {manifest.step}"
    form = "the adapter of " if arguments.adapter else f"an adapter merged into {merged} matrices, " if merged else ""
    print(f"{arguments.output}: {form}{step}, {'in PEFT' if arguments.adapter else 'a Hugging Face folder'}")
    return 0


def _refuse_without_effect(overrides: list[str], copied: bool, is_adapter: bool) -> None:
    for override in overrides:
        if override.startswith("model.dtype=") and (copied or is_adapter):
            why = "an adapter is merged in float32" if is_adapter else "these weights are copied as they are"
            raise UserError(f"{override}: {why}; leave it out, or name a checkpoint of a run without model.lora")
