"""The parts of `make gpu` that need Ray and vLLM, rehearsed with CPU engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.agreement import TOLERANCES
from benchmarks.gpu.parts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.timeout(2800)
def test_weights_agreement_and_quick_start_are_measured_with_real_engines(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(file)]
    words += [word for name in ("transports", "agreement", "quickstart") for word in ("--part", name)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=2700)
    document = json.loads(file.read_text())
    assert done.returncode == 0, [part["reason"] for part in document["parts"]]
    transports, agreement, quickstart = (part["figures"] for part in document["parts"])
    assert [line["transport"] for line in transports] == ["memory", "ipc", "nccl"]
    assert transports[0]["pause_s"] > 0 and all("not_measured" in line for line in transports[1:])
    of_float32 = next(line for line in agreement if line["dtype"] == "float32")
    assert of_float32[f"beyond_{TOLERANCES[0]:g}"] == 0
    assert len(quickstart) == 2 and quickstart[0]["step_s"] > 0
