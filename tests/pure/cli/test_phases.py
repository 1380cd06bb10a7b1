"""A command says what it does before that takes long, and again while it lasts."""

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from service.run.phases import phase, say
from tests.waiting import until

ROOT = Path(__file__).parents[3]


def test_a_phase_is_said_at_once_again_while_it_lasts_and_no_more_afterwards() -> None:
    said: list[str] = []
    waited_for = ["the trainer"]
    with phase("loading the model", said.append, lambda: ", ".join(waited_for), seconds=0.01):
        assert said[0] == "loading the model ..."
        until(lambda: len(said) >= 3)
        assert re.fullmatch(r"loading the model \.\.\. \d+ s, waiting for the trainer", said[1])
        waited_for.clear()
        until(lambda: re.fullmatch(r"loading the model \.\.\. \d+ s", said[-1]))
    with pytest.raises(ZeroDivisionError), phase("failing", said.append, seconds=60):
        _ = 1 // 0
    until_the_end = list(said)
    with phase("the next one", said.append, seconds=60):
        pass
    assert said == [*until_the_end, "the next one ..."]


def test_a_phase_that_is_over_soon_is_not_spoken_of_where_that_is_asked() -> None:
    said: list[str] = []
    with phase("reading", said.append, after=60):
        pass
    assert said == []
    with phase("reading", said.append, after=0.01, seconds=60):
        until(lambda: said)
    assert len(said) == 1 and re.fullmatch(r"reading \.\.\. \d+ s", said[0])


def test_a_reader_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    say("one")
    with sys.stdout as nowhere:
        assert not isinstance(nowhere, Gone)
        say("two")


def test_a_command_says_what_it_does_before_it_loads_what_takes_seconds() -> None:
    words = ["plan", "--gpu", "h1000", "--config", "configs/quickstart.yaml"]
    command = [sys.executable, "-X", "importtime", "-m", "service", *words]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400, check=False
    )
    assert done.returncode == 2, done.stdout[-2000:]
    lines = [line.rpartition("|")[2].strip() for line in done.stdout.splitlines()]  # of an import when it is done
    assert lines.index("loading PyTorch ...") < lines.index("torch")
