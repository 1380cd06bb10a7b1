"""The core's examples hold, and its README names files that are there."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import service.columns
import service.handoff
from service.handoff.__main__ import main

MODULES = sorted(info.name for info in pkgutil.walk_packages(service.handoff.__path__, "service.handoff."))
CORE = Path(__file__).parents[3] / "service" / "handoff"


def test_the_example_prints_the_ledger_after_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path)
    printed = capsys.readouterr().out
    states = re.findall(r"^(\w+) .*?(?:'(\w+)')?}, tokens {(?:'(\w+)': (\d))?}", printed, re.M)
    assert states == [
        ("claim", "issued", "", ""),
        ("submit", "open", "open", "2"),
        ("submit", "complete", "open", "4"),
        ("lease", "leased", "open", "4"),
        ("release", "complete", "open", "4"),
        ("lease", "leased", "open", "4"),
        ("commit", "", "stepped", "4"),
        ("covered", "", "trained", "4"),
    ]


def test_the_readme_names_files_that_are_there() -> None:
    text = (CORE / "README.md").read_text()
    named = set(re.findall(r"[\w/]+\.py", text))
    folders = (CORE, CORE.parents[1], CORE.parents[1] / "tests" / "pure" / "buffer")
    assert not [name for name in named if not any((folder / name).is_file() for folder in folders)]


@pytest.mark.parametrize("name", ["service.columns", *MODULES])
def test_the_examples_of_a_module_hold(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
