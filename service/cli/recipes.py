"""The recipes that come with Baton, and the arguments for configurations."""

from __future__ import annotations

import argparse
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def recipes() -> Path:
    """The folder of recipes: `service/recipes` in an installed package, `configs` in a checkout."""
    packaged = PACKAGE / "recipes"
    return packaged if packaged.is_dir() else PACKAGE.parent / "configs"


def config_file(word: str) -> Path:
    """The file that `--config` names, or, if there is no such file, the recipe `configs/NAME.yaml`."""
    path = Path(word)
    if path.parent == Path("configs") and not path.exists() and (recipes() / path.name).is_file():
        return recipes() / path.name
    return path


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that has a configuration."""
    text = (
        "a YAML file; given again, later files are merged over earlier ones; configs/NAME.yaml is also found where "
        "Baton is installed"
    )
    parser.add_argument("--config", action="append", type=config_file, default=[], metavar="FILE", help=text)
    # `split_overrides` removes the settings before parsing; this argument only shows them in --help.
    text = "set one value over the files"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=text)
