"""The core's example runs, and its README names files that are there."""

import re
from pathlib import Path

import pytest

from service.handoff.__main__ import main

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
