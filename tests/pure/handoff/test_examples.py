"""The worked examples in the docstrings of the handoff core, run as tests."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import service.columns
import service.handoff

MODULES = sorted(info.name for info in pkgutil.walk_packages(service.handoff.__path__, "service.handoff."))


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_examples_of_columns_hold() -> None:
    result = doctest.testmod(service.columns)
    assert result.attempted > 0 and result.failed == 0
