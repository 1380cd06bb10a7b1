"""Checks that training computes a small model like MODEL as the code of the model's family does; without MODEL, prints
the table of families in docs/models.md."""

import argparse
import sys
from pathlib import Path

import torch
from transformers import PretrainedConfig
from transformers.utils import logging

from service.errors import UserError
from service.learn.model.hf_config import logit_scale, read_config
from service.model_folder import FAMILIES, MODEL_CONFIG, experts_of, model_config, quantised
from tests.families.prove import Finding, prove
from tests.families.small import shrunk, small_config

HEADING = """\
| family | layers | what is read from its configuration | comparisons | largest difference |
|---|---|---|---|---|
"""


def main() -> int:
    """Check the model that is named, or print the table of all families; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.families", description=__doc__)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a Hugging Face folder or its config.json")
    model = parser.parse_args().model
    torch.set_num_threads(1)  # the models are so small that threads would only wait for each other
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        if model is not None:
            return check(model)
        print(HEADING, end="")
        for family in FAMILIES:
            config = small_config(family)
            print(family_line(family, config, prove(config)), end="", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def check(model: str) -> int:
    """Print the result of each comparison; returns 1 if a comparison fails."""
    config = _small(model)
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


def _small(model: str) -> PretrainedConfig:
    """A small model like the one in a folder, given by its path or that of its config.json.

    Raises:
        UserError: the folder holds no model, or one whose weights are quantised or whose settings are too few.
    """
    folder = Path(model).parent if Path(model).name == MODEL_CONFIG else Path(model)
    if reason := quantised(model_config(folder)):
        raise UserError(f"{model} cannot be trained: {reason}")
    try:
        return shrunk(read_config(folder, proven=False))
    except (AttributeError, KeyError) as error:
        raise UserError(
            f"{model} cannot be trained: its configuration lacks what all families have: {error}"
        ) from error


def family_line(family: str, config: PretrainedConfig, findings: list[Finding]) -> str:
    """The line of a model family in the table: its name, its layers, its traits, and the results of its proof."""
    passed = sum(finding.holds for finding in findings)
    worst = max(finding.difference for finding in findings)
    cells = (f"`{family}`", _layers(config), ", ".join(_traits(config)) or "-", f"{passed} of {len(findings)}")
    return f"| {' | '.join(cells)} | {worst:.0e} |\n"


def _layers(config: PretrainedConfig) -> str:
    kinds = {kind.removesuffix("_attention") for kind in getattr(config, "layer_types", None) or ()}
    if not kinds:
        kinds = {"sliding" if getattr(config, "sliding_window", None) else "full"}
    return ", ".join(sorted(kinds))


def _traits(config: PretrainedConfig) -> list[str]:
    """The family's differences from Llama, according to the configuration."""
    settings = config.to_dict()
    no_rope = 0 in (settings.get("no_rope_layers") or ())
    partial_rope = (settings.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) != 1.0
    found = {
        "experts": experts_of(config) > 0,
        "tied head": config.tie_word_embeddings,
        "scaled logits": logit_scale(config) != 1,
        "layers without RoPE": no_rope,
        "RoPE on a part of each head": partial_rope,
    }
    return [trait for trait, has in found.items() if has]


if __name__ == "__main__":
    sys.exit(main())
