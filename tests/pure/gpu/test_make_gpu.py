"""`make gpu` on a machine without a GPU: a rehearsal, parts that crash, hang or lack a package, and its arithmetic."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import parts as of_parts
from benchmarks.gpu import suite
from benchmarks.gpu.expected import H100, UTILISATION, Step, attention_flops, attention_rates, head_seconds
from benchmarks.gpu.figures import Range, line, not_run
from benchmarks.gpu.parts import PARTS, ROOT, run_part
from benchmarks.gpu.steps import MICRO_BATCHES, shape_on, trained
from benchmarks.gpu.table import markdown
from benchmarks.gpu.trace import gaps, kernels
from benchmarks.shapes import SHAPES
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
        ("raise Skipped('needs two GPUs')", {}, "not run", "needs two GPUs"),
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


def test_a_part_without_its_packages_is_not_run_and_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(tmp_path, monkeypatch, "pass", needs=("json", "no_such_package"))
    assert (found["state"], found["reason"]) == ("not run", "not installed: no_such_package")


def test_nothing_that_a_part_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    body = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(p.pid))"
    assert outcome(tmp_path, monkeypatch, body)["state"] == "measured"
    stat = Path("/proc") / child.read_text() / "stat"
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_a_last_line_that_was_cut_and_a_part_without_figures_are_no_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = outcome(tmp_path, monkeypatch, f"open({str(tmp_path / 'made.jsonl')!r}, 'a').write('{{')")
    assert (found["state"], found["figures"]) == ("measured", [{"device": "cpu", "value": 1.5}])
    (tmp_path / "silent.py").write_text("def measure(device, give): pass")
    found = run_part(MadePart("silent", "silent"), "cpu", tmp_path)  # type: ignore[arg-type]
    assert (found["state"], found["reason"]) == ("failed", "it gave no figure")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_ends_the_processes_of_its_part_and_keeps_earlier_figures(
    number: signal.Signals, tmp_path: Path
) -> None:
    child, file = tmp_path / "child", tmp_path / "gpu.json"
    body = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    for name, rest in {"quick": "pass", "slow": body}.items():
        text = f"def measure(device, give):\n    give({{'figure': 'one', 'value': 1.5}})\n    {rest}\n"
        (tmp_path / f"{name}.py").write_text(text)
    script = f"""import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored if the tests run in the background
from benchmarks.gpu import __main__ as command, parts

class Made(parts.Part):
    module = property(lambda self: self.name)

command.PARTS = [Made(name, name, 60.0, ()) for name in ("quick", "slow")]
command._machine = lambda device: ("", {{}})
sys.argv = ["gpu", "--device", "cpu", "--json", {str(file)!r}]
sys.exit(command.main())
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-c", script]
    running = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    until(lambda: running.poll() is not None or (child.exists() and bool(child.read_text())))
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said.splitlines() == [f"benchmarks.gpu: stopped; {file} has the parts that had ended"]
    assert not (Path("/proc") / child.read_text()).exists()
    assert [part["part"] for part in json.loads(file.read_text())["parts"]] == ["quick"]


def test_all_deadlines_together_are_within_the_promise_and_each_within_five_minutes() -> None:
    assert sum(part.longest for part in PARTS) <= MINUTES * 60
    assert max(part.longest for part in PARTS) < 300
    assert command.MINUTES == MINUTES
    makefile = (ROOT / "Makefile").read_text()
    assert f"in {MINUTES} minutes" in makefile and "-m benchmarks.gpu\n" in makefile and "\ngpu: ##" in makefile


def run_in(minutes: float, share: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What becomes of each part, where each takes this share of its deadline."""
    clock = itertools.count()
    now = [0.0]

    def taken(part: of_parts.Part, device: str, logs: Path) -> dict[str, Any]:
        now[0] += share * part.longest
        return of_parts.outcome(part, "measured", "", share * part.longest, [line("made", float(next(clock)), "s")])

    monkeypatch.setattr(command, "run_part", taken)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(command, "_machine", lambda device: ("", {"device": device}))
    monkeypatch.setattr(sys, "argv", ["gpu", "--minutes", str(minutes), "--json", str(folder / "gpu.json")])
    assert command.main() == 0
    assert now[0] <= 60 * minutes
    return {part["part"]: part["state"] for part in json.loads((folder / "gpu.json").read_text())["parts"]}


def test_the_list_runs_to_its_end_in_its_order_even_if_each_part_takes_all_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_in(MINUTES, 1.0, tmp_path, monkeypatch) == {part.name: "measured" for part in PARTS}
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["part"] for part in found] == [part.name for part in PARTS]


@pytest.mark.parametrize("minutes", [1, 12, 24])
def test_where_time_is_short_the_parts_of_the_least_value_are_left_out(
    minutes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = run_in(minutes, 1.0, tmp_path, monkeypatch)
    longest = itertools.accumulate(part.longest for part in PARTS)
    kept = {part.name for part, until in zip(PARTS, longest, strict=True) if until <= 60 * minutes}
    assert kept <= {name for name, state in states.items() if state == "measured"}
    assert {"machine"} <= {name for name, state in states.items() if state == "measured"}
    assert "not run" in states.values()


def test_a_part_that_was_left_out_runs_if_others_were_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(run_in(12, 0.3, tmp_path, monkeypatch).values()) == {"measured"}


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.9, "below"), (1.0, "inside"), (2.0, "inside"), (2.1, "above"), (float("nan"), "failed")]
)
def test_a_figure_has_the_range_and_a_verdict(value: float, verdict: str) -> None:
    found = line("copy", value, "TB/s", Range(1.0, 2.0), "once")
    part = {"title": "Copies", "state": "measured", "reason": "", "figures": [found, not_run("product", "no GPU")]}
    text = markdown({"machine": {}, "seconds": 1, "parts": [part]})
    assert f"| copy | {value:.4g} | TB/s | 1 to 2 | {verdict} | once |" in text
    assert "| product |  |  |  | not run | no GPU |" in text


def test_the_longest_gaps_are_named_by_what_ran_before_and_after() -> None:
    ran = [(0.0, 2.0, "a"), (1.0, 1.5, "inside a"), (2.0, 3.0, "b"), (3.5, 4.0, "c"), (6.0, 8.0, "d")]
    found, idle = gaps(ran)
    assert [(gap.seconds, gap.after, gap.before) for gap in found] == [(2.0, "c", "d"), (0.5, "b", "c")]
    assert idle == 2.5 / 8
    assert gaps([]) == ([], 0.0)


def test_of_a_trace_only_what_ran_on_the_gpu_counts() -> None:
    events = [
        {"ph": "X", "cat": kind, "ts": 1e6 * at, "dur": 5e5, "name": kind}
        for at, kind in enumerate(("kernel", "cpu_op", "gpu_memcpy", "cuda_runtime"))
    ]
    file = gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}).encode())
    assert kernels(file, "cuda") == [(0.0, 0.5, "kernel"), (2.0, 2.5, "gpu_memcpy")]
    assert [gap.seconds for gap in gaps(kernels(file, "cuda"))[0]] == [1.5]


def test_a_learner_is_gone_before_the_next_one_takes_the_memory() -> None:
    with trained(torch.device("cpu"), shape_on("cpu", SHAPES["Qwen3-0.6B"])) as steps:
        learner = weakref.ref(steps.learner)
    assert learner() is None and steps.seconds > 0


def test_the_expected_ranges_hold_an_arithmetic_by_hand() -> None:
    shape = shape_on("cuda", SHAPES["Qwen3-1.7B"])
    counted = Step.of(shape, "cuda")
    hidden, layers, inner, heads, keys = 2048, 28, 6144, 16, 8
    of_layers = layers * (hidden * 128 * (2 * heads + 2 * keys) + 3 * hidden * inner)
    head, rows = hidden * 151936, 8
    forward = 2 * of_layers * 16384 + 2 * head * 8192 + layers * attention_flops(rows, 2048, heads, 128)[0]
    assert counted.model_flops == pytest.approx(3 * forward, rel=0.02)
    low, high = UTILISATION["Qwen3-1.7B"]
    assert low < 0.508 < high  # 50.8 % was measured on an H100
    seconds = MICRO_BATCHES * counted.model_flops / (low * H100.flops)
    assert counted.utilisation(seconds) == pytest.approx(low)
    # a loss token: three products with the head and one to compute logits again, at 650 TFLOP/s
    products = 4 * 2 * 1024 * 151936 / 650e12
    compiled, plain = (head_seconds(8192, 1024, 151936, each) for each in (True, False))
    assert products < sum(compiled) / 2 < 2 * products < plain.low
    assert attention_rates("FA4", 1024)[0].low < attention_rates("FA4", 32768)[0].low


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
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--part", "machine", "--json", str(tmp_path / name)])
    assert command.main() == 2
    assert capsys.readouterr().err.splitlines() == [
        f"benchmarks.gpu: --json {tmp_path / name} is no file name that ends in .json; give one"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


def test_a_file_that_cannot_be_written_and_minutes_that_are_none_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_machine", lambda device: ("", {}))
    (tmp_path / "file").touch()
    (tmp_path / "table.md").mkdir()
    for name in ("file/gpu.json", "file.json", "table.json"):
        monkeypatch.setattr(sys, "argv", ["gpu", "--json", str(tmp_path / name)])
        assert command.main() == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"benchmarks.gpu: --json {tmp_path / name} cannot be written (")
    for minutes in ("0", "-5", "nan", "many"):
        monkeypatch.setattr(sys, "argv", ["gpu", "--minutes", minutes, "--json", str(tmp_path / "gpu.json")])
        with pytest.raises(SystemExit, match="2"):
            command.main()
        assert f"argument --minutes: {minutes} is no number of minutes above 0" in capsys.readouterr().err


def test_a_test_that_failed_is_an_exit_code_of_1_and_a_machine_without_git_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "commit" not in command._machine("cpu")[1]
    figure = {"figure": "test_one", "verdict": "failed"}
    monkeypatch.setattr(command, "run_part", lambda part, *_: of_parts.outcome(part, "measured", "", 1.0, [figure]))
    words = ["gpu", "--device", "cpu", "--part", "attention", "--json", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 1


@pytest.mark.full
def test_all_but_the_engine_is_rehearsed_on_a_machine_without_ray_and_vllm(tmp_path: Path) -> None:
    for name in NO_ENGINE:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not there')")
    file = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(file)]
    words += [word for part in PARTS if "vllm" not in part.needs for word in ("--part", part.name)]
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    document = json.loads(file.read_text())
    assert done.returncode == 0, [part["reason"] for part in document["parts"]]
    found = {each["part"]: {figure["figure"]: figure for figure in each["figures"]} for each in document["parts"]}
    assert list(found) == [part.name for part in PARTS if "vllm" not in part.needs]
    for figures in found.values():
        assert any(figure["verdict"] == "rehearsed" for figure in figures.values() if "low" in figure)
        assert {figure["verdict"] for figure in figures.values() if "low" in figure} == {"rehearsed"}
        assert all(figure["value"] >= 0 for figure in figures.values() if "value" in figure)
    assert found["learner"]["Qwen3-0.6B: gap 10"]["note"].startswith("after ")
    assert (tmp_path / "gpu" / "step-Qwen3-0.6B.json.gz").stat().st_size > 0
    assert found["attention"]["FA4, rows of 16"]["verdict"] == "not run"
    assert found["weights"]["shared memory to GPU, registered"]["note"] == "needs a CUDA GPU"
    assert found["sharded"]["Qwen3-1.7B: sharded over unsharded"]["value"] > 0
    table = file.with_suffix(".md").read_text()
    assert table == markdown(document)
    assert "### Training steps" in table and "Skipped: needs a CUDA GPU" in table


def test_without_pytest_the_figures_are_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    given: list[Any] = []
    suite.run(given.append, "tests/gpu/test_learn.py")
    assert [(each["verdict"], each["note"]) for each in given] == [("not run", "pytest is not installed")]


def test_a_test_that_fails_or_is_skipped_is_a_line_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "test_made.py"
    lines = ["import pytest", "async def test_awaits(): pass", "def test_fails(): raise ValueError('wrong')"]
    file.write_text("\n".join([*lines, "def test_skips(): pytest.skip('needs a GPU')"]))
    given = told_of(str(file))
    assert [each["verdict"] for each in given] == ["inside", "failed", "not run", "failed"]
    assert "wrong" in given[1]["note"] and given[2]["note"] == "Skipped: needs a GPU"
    assert given[3]["note"] == "pytest ended with TESTS_FAILED"


def test_tests_that_do_not_exist_are_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text("def test_one(): pass")
    (tmp_path / "test_skipped.py").write_text("import pytest; pytest.importorskip('no_such_package')")
    assert [each["verdict"] for each in told_of(str(tmp_path / "test_made.py"), "-k", "another")] == ["failed"]
    assert [each["verdict"] for each in told_of(str(tmp_path / "test_skipped.py"))] == ["not run"]


def told_of(*words: str) -> list[Any]:
    """The lines about these tests, which run in a process of their own."""
    script = f"from benchmarks.gpu import suite; import json; suite.run(lambda x: print(json.dumps(x)), *{words!r})"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    return [json.loads(each) for text in done.stdout.splitlines() if (each := text[text.find("{") :]).startswith("{")]
