"""Files that come with Baton: the recipes, and the folder that `baton init` copies."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def recipes() -> Path:
    """The folder of recipes: `service/recipes` of an installed package, `configs` of a checkout."""
    packaged = PACKAGE / "recipes"
    return packaged if packaged.is_dir() else PACKAGE.parent / "configs"


def new_task() -> Path:
    """The folder that a new task is copied from."""
    return Path(str(resources.files("baton.examples") / "new_task"))


def config_file(word: str) -> Path:
    """The file that `--config` names; where there is none, `configs/NAME.yaml` is the recipe of that name."""
    path = Path(word)
    if path.parent == Path("configs") and not path.exists() and (recipes() / path.name).is_file():
        return recipes() / path.name
    return path
