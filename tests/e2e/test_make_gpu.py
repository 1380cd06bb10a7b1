"""The parts of `make gpu` that need Ray and vLLM, rehearsed with CPU engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.timeout(2800)
def test_engine_and_game_are_measured_with_real_engines(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(file)]
    words += [word for name in ("engine", "game") for word in ("--part", name)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=2700)
    document = json.loads(file.read_text())
    assert done.returncode == 0, [part["reason"] for part in document["parts"]]
    engine, game = ({line["figure"]: line for line in part["figures"]} for part in document["parts"])
    skipped = [line for line in engine.values() if line["verdict"] == "not run"]
    assert len(skipped) == 2 and all(line["note"].startswith("Skipped: needs") for line in skipped)
    assert engine["engine against trainer, root mean square"]["value"] < 1e-3
    assert "reward, last fifth less first" in game and game["step"]["value"] > 0
