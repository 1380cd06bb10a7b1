"""Chaos runs, and the figures that they leave."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.driver.prepare import prepare
from service.config import load_config
from tests.chaos.real_pairs import PairRun
from tests.chaos.theatre import STEPS, Play, settings

FIGURES_FILE = "BATON_CHAOS_FIGURES"
"""Environment variable that names a file for the figures of a session, beside what is printed."""
FIGURES = pytest.StashKey[Counter[str]]()


@pytest.fixture
def staged(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[str], Play]]:
    """Makes chaos runs, each with a folder of its own; counts what befell them."""
    figures = request.config.stash.setdefault(FIGURES, Counter())
    plays: list[Play] = []

    def make(name: str) -> Play:
        plays.append(Play(tmp_path / name, figures))
        return plays[-1]

    yield make
    for play in plays:
        play.end()
        play.count()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What happens when nothing fails."""
    return Play(tmp_path_factory.mktemp("calm"), Counter()).tell(settings(steps=STEPS)).start().ended(300)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with the quick start's words."""
    return prepare(load_config(["configs/quickstart.yaml"]), tmp_path_factory.mktemp("model")).model_folder


@pytest.fixture
def started(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[], PairRun]]:
    """Starts runs; ends what a failed test left, and counts."""
    made, figures = list[PairRun](), request.config.stash.setdefault(FIGURES, Counter())

    def start() -> PairRun:
        made.append(PairRun(tmp_path, model))
        return made[-1]

    yield start
    for run in made:
        print(run.tail())
        run.close()
        figures.update(run.figures)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = terminalreporter.config.stash.get(FIGURES, Counter())
    if figures:
        terminalreporter.section("chaos")
        for what, count in sorted(figures.items()):
            terminalreporter.line(f"{count:8d}  {what}")
        if file := os.environ.get(FIGURES_FILE):
            Path(file).write_text(json.dumps(figures))
