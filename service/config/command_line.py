"""Loads the configuration from a command line's arguments."""

from __future__ import annotations

import argparse

from service.config import check, load
from service.config.load import Loaded
from service.errors import UserError


def checked_config(arguments: argparse.Namespace, overrides: list[str]) -> Loaded:
    """Load and check the configuration that a command line gives, with the place where each value was set; `UserError`
    if it is missing or wrong."""
    no_more_words(arguments)
    if not arguments.config:
        raise UserError("give a configuration: --config FILE (such as --config configs/quickstart.yaml)")
    loaded = load(arguments.config, overrides)
    check(loaded.config, loaded.source)
    return loaded


def no_more_words(arguments: argparse.Namespace) -> None:
    """Raises `UserError` if a word of a command line is neither an argument nor a setting."""
    if arguments.overrides:
        word = arguments.overrides[0]
        hint = f"; did you mean --config {word}?" if word.endswith((".yaml", ".yml")) else ""
        if word.endswith(("}", "]", ",")):  # the shell has cut a value at its spaces
            hint = "; put quotes around a setting that has spaces: 'section.key={KEY: value}'"
        elif "=" in word:  # for example the label of a host
            hint = "; a key with other signs than letters, digits and _ goes into braces: 'section.key={KEY: value}'"
        raise UserError(f"{word!r}: not of the form section.key=value{hint}")
