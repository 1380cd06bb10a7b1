"""Chaos runs, and the figures that they leave."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.driver.prepare import prepare
from service.config import load_config
from tests.chaos.real_pairs import PairRun

FIGURES = pytest.StashKey[Counter[str]]()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with the quick start's words."""
    return prepare(load_config(["configs/quickstart.yaml"]), tmp_path_factory.mktemp("model")).model_folder


@pytest.fixture
def started(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., PairRun]]:
    """Starts runs; ends what a failed test left, and counts."""
    made, figures = list[PairRun](), request.config.stash.setdefault(FIGURES, Counter())

    def start(*settings: str, **variables: str) -> PairRun:
        made.append(PairRun(tmp_path, model, variables, settings))
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
