"""Checks that training computes a small model like MODEL as the code of the model's family does; without MODEL, prints
the table of families in docs/models.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import PretrainedConfig
from transformers.utils import logging

from service.errors import UserError
from service.learn.model.hf_config import read_config
from service.model_folder import FAMILIES, MODEL_CONFIG, model_config, near_family, quantised
from tests.families.prove import prove
from tests.families.small import shrunk, small_config
from tests.families.table import families_table


def main() -> int:
    """Check the model that is named, or print the table of all families; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a Hugging Face folder, a config.json or a model type; none: the table",
    )
    model = parser.parse_args().model
    _quietly()
    try:
        if model is not None:
            return check(model)
        for line in families_table(FAMILIES):
            print(line, end="", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def check(model: str) -> int:
    """Print the result of each comparison; returns 1 if a comparison fails."""
    config = _small(model, _folder(model))
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


def _quietly() -> None:
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
    if folder is not None and (reason := quantised(model_config(folder))):
        raise UserError(f"{model} cannot be trained: {reason}")
    try:
        return small_config(model) if folder is None else shrunk(read_config(folder, proven=False))
    except ValueError as error:
        near = near_family(model)
        raise UserError(
            f"{model}: neither a folder with a {MODEL_CONFIG} nor a model type of the installed transformers; "
            + (f"the nearest family is {near}" if near else "docs/models.md lists the families")
        ) from error
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"{model} cannot be trained: its configuration lacks what all families have: {error}"
        ) from error


if __name__ == "__main__":
    sys.exit(main())
