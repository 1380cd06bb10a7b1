"""`baton models`: checks that training computes a model as the code of the model's family does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from service.config.model_folder import FAMILIES, MODEL_CONFIG, model_config, nearest_family, quantised
from service.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ABOUT = "A family is trained if a small random model of it passes the comparisons of docs/models.md. They run on a CPU."

EXAMPLES = """\
examples:
  baton models check models/Qwen3-0.6B                   # a folder, or its config.json: a small model of the same kind
  baton models check gpt_oss                             # a model type, as transformers configures it by default
  baton models table                                     # the table in docs/models.md
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of `baton models`."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="whether a model's family is trained rightly, and what fails")
    check.add_argument("model", help="a Hugging Face folder, a config.json, or a model type")
    check.set_defaults(command=run_check)
    table = actions.add_parser("table", help="print the table of families in docs/models.md")
    table.set_defaults(command=run_table)


def run_check(arguments: argparse.Namespace, _: list[str]) -> int:
    """Print what each comparison finds; returns 1 if one fails."""
    from service.learn.proof.prove import prove

    _quietly()
    config = _small(arguments.model)
    findings = prove(config)
    for finding in findings:
        print(f"{finding.name:<20}{finding.told}")
    model_type = config.model_type.removesuffix("_text")
    if not all(finding.holds for finding in findings):
        print(f"{model_type} cannot be trained: what fails is named above")
        return 1
    known = model_type in FAMILIES
    print(f"{model_type} passes" + ("" if known else ", but no run takes it: it is not in docs/models.md"))
    return 0


def run_table(arguments: argparse.Namespace, _: list[str]) -> int:
    """Print a line for each supported family."""
    from service.learn.proof.table import families_table

    _quietly()
    for line in families_table(FAMILIES):
        print(line, end="", flush=True)
    return 0


def _quietly() -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)  # the models are so small that threads would only wait for each other
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _small(model: str) -> PretrainedConfig:
    """The configuration of a small model of the same family as a folder, a config.json or a model type. `UserError` if
    transformers knows no such model, or its weights are quantised."""
    from service.learn.model.hf_config import read_config
    from service.learn.proof.small import shrunk, small_config

    path = Path(model)
    folder = path.parent if path.name == MODEL_CONFIG else path
    if (folder / MODEL_CONFIG).is_file() and (reason := quantised(model_config(folder))):
        raise UserError(f"{model} cannot be trained: {reason}")
    try:
        if (folder / MODEL_CONFIG).is_file():
            return shrunk(read_config(folder, proven=False))
        return small_config(model)
    except ValueError as error:
        raise UserError(
            f"{model}: neither a folder with a {MODEL_CONFIG} nor a model type of the installed transformers; the "
            f"nearest family is {nearest_family(path.name)}"
        ) from error
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"{model} cannot be trained: its configuration lacks what all families have: {error}"
        ) from error
