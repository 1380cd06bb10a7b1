"""`make gpu` on a machine without a GPU: a rehearsal, and parts that crash, hang or lack a package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.parts import END_SECONDS, PARTS, ROOT, run_part
from benchmarks.gpu.table import markdown
from tests.waiting import until

NO_ENGINE = ("ray", "vllm")
MINUTES = 25


class MadePart(NamedTuple):
    """A part whose module lies elsewhere."""

    name: str
    module: str
    title: str = "Made up"
    seconds: float = 60.0
    needs: tuple[str, ...] = ()


def outcome(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, **fields: Any) -> dict[str, Any]:
    """What becomes of a part that gives one line of figures and then does this."""
    lines = ["import os, time, signal", "from benchmarks.gpu.parts import Skipped", "def measure(device, give):"]
    lines += ["    give({'device': device, 'value': 1.5})", f"    {body}"]
    (folder / "made_part.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return run_part(MadePart("made", "made_part", **fields), "cpu", folder)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "fields", "state", "reason"),
    [
        ("pass", {}, "measured", ""),
        ("raise Skipped('needs two GPUs')", {}, "skipped", "needs two GPUs"),
        ("raise ValueError('no such shape')", {}, "failed", "ended with exit code 1: ValueError: no such shape"),
        ("os.kill(os.getpid(), signal.SIGKILL)", {}, "failed", "ended with exit code -9: device=cpu value=1.5"),
        ("time.sleep(600)", {"seconds": 5.0}, "failed", "not done after 5 s; the last line of made.log: device=cpu"),
    ],
)
def test_a_part_that_fails_keeps_its_figures_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, fields: dict[str, Any], state: str, reason: str
) -> None:
    found = outcome(tmp_path, monkeypatch, body, **fields)
    assert found["state"] == state and found["reason"].startswith(reason) and bool(reason) == bool(found["reason"])
    assert found["figures"] == [{"device": "cpu", "value": 1.5}]


def test_a_part_without_its_packages_is_skipped_and_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(tmp_path, monkeypatch, "pass", needs=("json", "no_such_package"))
    assert (found["state"], found["reason"]) == ("skipped", "not installed: no_such_package")


def test_nothing_that_a_part_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    body = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(p.pid))"
    assert outcome(tmp_path, monkeypatch, body)["state"] == "measured"
    stat = Path("/proc") / child.read_text() / "stat"
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_all_deadlines_together_are_within_the_promise() -> None:
    assert sum(part.seconds + END_SECONDS for part in PARTS) < MINUTES * 60
    makefile = (ROOT / "Makefile").read_text()
    assert f"under {MINUTES} minutes" in makefile and "python -m benchmarks.gpu\n" in makefile


def test_without_a_gpu_it_ends_at_once_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert command.main() == 2
    assert capsys.readouterr().err.splitlines() == [
        "benchmarks.gpu: torch finds no CUDA GPU; --device cpu rehearses the parts with small shapes"
    ]


@pytest.mark.parametrize("name", ["gpu", "gpu.md", "folder.json"])
def test_a_file_that_its_own_table_or_logs_would_replace_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.json").mkdir()
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--part", "advantage", "--json", str(tmp_path / name)])
    assert command.main() == 2
    assert capsys.readouterr().err.splitlines() == [
        f"benchmarks.gpu: --json {tmp_path / name} is no file name that ends in .json; give one"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_learner_advantages_and_suite_are_rehearsed_on_a_machine_without_ray_and_vllm(tmp_path: Path) -> None:
    for name in NO_ENGINE:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not there')")
    file = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(file)]
    words += [word for name in ("learner", "advantage", "suite") for word in ("--part", name)]
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    document = json.loads(file.read_text())
    assert done.returncode == 0, [part["reason"] for part in document["parts"]]
    learner, advantage, suite = document["parts"]
    variants = {"default", "eager", "padded", "samples", "shared_prefix"}
    assert {line["variant"] for line in learner["figures"]} == variants
    assert all(line["tokens_a_second"] > 0 for line in learner["figures"])
    assert advantage["figures"][0]["copy_gb_s"] > 0
    assert {line["outcome"] for line in suite["figures"]} == {"skipped"}
    assert any(line["reason"].endswith("could not import 'ray': ray is not there") for line in suite["figures"])
    table = file.with_suffix(".md").read_text()
    assert table == markdown(document)
    assert "### Training steps" in table and "| needs a CUDA GPU |" in table.replace("Skipped: ", "")
