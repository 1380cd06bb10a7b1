"""The command `baton quickstart`: trains a small model with the recipe `configs/quickstart.yaml`."""

from __future__ import annotations

import argparse

from service.cli.in_ray import in_ray
from service.cli.recipes import recipes

ABOUT = "Train a small model with real vLLM and FSDP, in some minutes on two CPU cores: configs/quickstart.yaml."

EXAMPLES = """\
examples:
  baton quickstart                                       # into runs/quickstart of the current folder
  baton quickstart run.max_steps=20 run.seed=1           # any setting of the recipe
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="set one value over the recipe")


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    """Run the recipe as `baton run` does."""
    words = {"name": "run", "config": [recipes() / "quickstart.yaml"], "overrides": arguments.settings, "resume": None}
    return in_ray(argparse.Namespace(**words), overrides)
