"""The part of `make gpu` that needs Ray and vLLM, rehearsed with a CPU engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import PARTS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.timeout(2800)
def test_engines_pause_and_are_compared_and_parts_that_are_tests_say_that_they_need_a_gpu(tmp_path: Path) -> None:
    file, names = tmp_path / "gpu.json", [part.name for part in PARTS if "vllm" in part.needs]
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(file)]
    words += [word for name in names for word in ("--part", name)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=2700)
    parts = {part["part"]: part for part in json.loads(file.read_text())["parts"]}
    assert done.returncode == 0, [part["reason"] for part in parts.values()]
    for name in ("routing", "deaths", "ipc"):
        (tests,) = parts[name]["figures"]
        assert tests["verdict"] == "not run" and "skipped" in tests["note"]
    assert [figure["value"] > 0 for figure in parts["pause"]["figures"]] == [True] * 3
    (compared,) = parts["agreement"]["figures"]
    assert compared["value"] < 1e-3
