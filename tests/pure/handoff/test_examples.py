"""The worked examples in the docstrings of the handoff core, run as tests."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    "batch",
    "branches",
    "columns",
    "digest",
    "groups",
    "merge",
    "pack",
    "prefix",
    "score",
    "tables",
    "validate",
    "versions",
    "wire",
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"service.handoff.{name}")).failed == 0


def test_every_module_that_changes_the_shape_of_data_has_an_example() -> None:
    for name in ("batch", "rows", "groups", "merge", "pack", "prefix", "score", "columns", "tree"):
        assert doctest.testmod(importlib.import_module(f"service.handoff.{name}")).attempted > 0, name
