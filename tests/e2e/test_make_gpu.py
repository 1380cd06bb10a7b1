"""The part of `make gpu` that needs Ray and vLLM, rehearsed with a CPU engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.timeout(2800)
def test_engine_and_trainer_are_compared_with_a_real_engine(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--part", "engine", "--json", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=2700)
    [part] = json.loads(file.read_text())["parts"]
    assert done.returncode == 0, part["reason"]
    tests, compared = part["figures"]
    assert tests["verdict"] == "not run" and "skipped" in tests["note"]
    assert compared["value"] < 1e-3
