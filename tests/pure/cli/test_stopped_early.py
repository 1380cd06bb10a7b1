"""A run that is stopped before Ray is up says so, in its folder too, and exits as one that was stopped later."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors import run as running
from service.config import Config, load_config
from service.prepare import Prepared


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in running.STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", running.STOP_SIGNALS)
def test_a_stop_signal_while_a_run_is_prepared_ends_it_in_order(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def slow(config: Config, path: Path) -> Prepared:
        os.kill(os.getpid(), number)
        time.sleep(60)
        raise AssertionError("the signal ends it")

    monkeypatch.setattr(running, "prepare", slow)
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    config = load_config(["configs/quickstart.yaml"], [f"run.dir={tmp_path}", "metrics.port=0"])
    assert running.run(config) == 128 + number
    assert capsys.readouterr().out.endswith("stopped before the first optimizer step\n")
    assert json.loads((tmp_path / "quickstart" / "summary.json").read_text())["state"] == "stopped"


def test_while_ray_starts_a_signal_ends_the_process_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[object] = []

    def starting(*arguments: object) -> int:
        found.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP))
        return 0

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    monkeypatch.setattr(running, "_run_on_ray", starting)
    monkeypatch.setattr(running, "keep_token_private", lambda environment, home: None)
    assert running.run(load_config(["configs/quickstart.yaml"], [f"run.dir={tmp_path}", "metrics.port=0"])) == 0
    assert found == [signal.SIG_DFL, signal.SIG_DFL]
