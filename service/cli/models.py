"""`baton models`: checks that training computes a model as the code of the model's family does."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from service.errors import UserError
from service.model_folder import FAMILIES, MODEL_CONFIG, model_config, near_family, quantised

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
    about = "whether a model's family is trained rightly, and what fails"
    check = actions.add_parser("check", help=about, description=f"Say {about}.")
    check.add_argument("model", metavar="MODEL", help="a Hugging Face folder, a config.json, or a model type")
    check.set_defaults(command=run_check)
    table = actions.add_parser("table", help="print the table of families in docs/models.md")
    table.set_defaults(command=run_table)


def run_check(arguments: argparse.Namespace, _: list[str]) -> int:
    """Print the result of each comparison; returns 1 if a comparison fails."""
    folder = _folder(arguments.model)  # refused at once: what follows takes seconds to load
    from service.learn.proof.prove import prove

    _quietly()
    config = _small(arguments.model, folder)
    findings = prove(config)
    alike: dict[str, list[str]] = {}
    for finding in findings:
        alike.setdefault(finding.reason or finding.name, []).append(finding.name)
    for finding in findings:
        first, *others = alike[finding.reason or finding.name]
        if finding.name == first:
            print(f"{first:<20}{finding.told}")
            if others:
                print(f"{', '.join(others)}: the same as {first}")
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


def _folder(model: str) -> Path | None:
    """The folder of a model, given by its path or that of its config.json; None: `model` is a model type.

    Raises:
        UserError: there is no such folder, or it has no config.json.
    """
    path = Path(model)
    folder = path.parent if path.name == MODEL_CONFIG else path
    if (folder / MODEL_CONFIG).is_file():
        return folder
    if "/" in model:
        raise UserError(f"{folder}: " + (f"there is no {MODEL_CONFIG}" if folder.is_dir() else "no such folder"))
    return None


def _small(model: str, folder: Path | None) -> PretrainedConfig:
    """A small model like the one in a folder, or of a model type; raises a `UserError` if transformers has no such
    model, or if the model's weights are quantised."""
    from service.learn.model.hf_config import read_config
    from service.learn.proof.small import shrunk, small_config

    if folder is not None and (reason := quantised(model_config(folder))):
        raise UserError(f"{model} cannot be trained: {reason}")
    try:
        return small_config(model) if folder is None else shrunk(read_config(folder, proven=False))
    except ValueError as error:
        near = near_family(model)
        raise UserError(
            f"{model}: neither a folder with a {MODEL_CONFIG} nor a model type of the installed transformers; "
            + (f"the nearest family is {near}" if near else "`baton models table` lists the families")
        ) from error
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"{model} cannot be trained: its configuration lacks what all families have: {error}"
        ) from error
