"""`make gpu` on a machine without a GPU: a rehearsal, parts that crash, hang or lack a package, and its arithmetic."""

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
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.expected import H100, UTILISATION, Step, attention_flops, attention_rates, head_seconds
from benchmarks.gpu.figures import Range, line, markdown, not_run
from benchmarks.gpu.parts import PARTS, ROOT, Part, outcome, run_part, run_tests
from benchmarks.gpu.steps import MICRO_BATCHES, shape_on, trained
from benchmarks.gpu.training import idle_share, kernels
from benchmarks.shapes import SHAPES
from tests.waiting import until

MINUTES = 35
PARTS_OF_CPU = [part for part in PARTS if "vllm" not in part.needs]


def made(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float = 60.0) -> dict[str, Any]:
    """What becomes of a part that gives one line of figures and then does this."""
    lines = ["import os, time, signal", "def measure(device, give):", "    give({'device': device, 'value': 1.5})"]
    (folder / "made_part.py").write_text("\n".join([*lines, f"    {body}"]))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return run_part(Part("made", "made_part:measure", "Made up", seconds), "cpu", folder)


@pytest.mark.parametrize(
    ("body", "seconds", "reason"),
    [
        ("open(os.path.join(os.path.dirname(__file__), 'made.jsonl'), 'a').write('{')", 60.0, ""),  # a line cut off
        ("raise ValueError('no such shape')", 60.0, "ended with exit code 1: ValueError: no such shape"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 60.0, "ended with exit code -9: device=cpu value=1.5"),
        ("time.sleep(600)", 5.0, "not done after 5 s; the last line of made.log: device=cpu"),
    ],
)
def test_a_part_that_fails_keeps_its_figures_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float, reason: str
) -> None:
    found = made(tmp_path, monkeypatch, body, seconds)
    assert found["state"] == ("failed" if reason else "measured")
    assert found["reason"].startswith(reason) and bool(reason) == bool(found["reason"])
    assert found["figures"] == [{"device": "cpu", "value": 1.5}]


def test_a_part_without_its_packages_is_not_run_and_one_without_figures_has_failed(tmp_path: Path) -> None:
    found = run_part(Part("made", "made_part:measure", "", 60.0, ("json", "no_such_package")), "cpu", tmp_path)
    assert (found["state"], found["reason"]) == ("not run", "not installed: no_such_package")
    found = run_part(Part("silent", "builtins:min", "", 60.0), "1", tmp_path)
    assert found["state"] == "failed" and not found["figures"]


def test_nothing_that_a_part_started_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    body = f"import subprocess; p = subprocess.Popen(['sleep', '600']); open({str(child)!r}, 'w').write(str(p.pid))"
    assert made(tmp_path, monkeypatch, body)["state"] == "measured"
    stat = Path("/proc") / child.read_text() / "stat"
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


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

command.PARTS = [parts.Part(name, f"{{name}}:measure", name, 60.0) for name in ("quick", "slow")]
command._machine = lambda device: ("", {{}})
sys.argv = ["gpu", "--device", "cpu", "--json", {str(file)!r}]
sys.exit(command.main())
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    running = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    until(lambda: running.poll() is not None or (child.exists() and bool(child.read_text())))
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said.splitlines() == [f"benchmarks.gpu: stopped; {file} has the parts that had ended"]
    assert not (Path("/proc") / child.read_text()).exists()
    assert [part["part"] for part in json.loads(file.read_text())["parts"]] == ["quick"]


def test_all_deadlines_together_are_within_the_promise_and_each_within_three_minutes() -> None:
    assert sum(part.longest for part in PARTS) <= MINUTES * 60
    assert max(part.longest for part in PARTS) <= 180
    assert command.MINUTES == MINUTES
    makefile = (ROOT / "Makefile").read_text()
    assert f"in {MINUTES} minutes" in makefile and "-m benchmarks.gpu\n" in makefile and "\ngpu: ##" in makefile


@pytest.mark.parametrize(("minutes", "share"), [(1, 1.0), (12, 1.0), (12, 0.3), (MINUTES, 1.0)])
def test_where_time_is_short_the_parts_of_the_least_value_are_left_out(
    minutes: float, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes this share of its deadline."""
    now = [0.0]

    def taken(part: Part, device: str, logs: Path) -> dict[str, Any]:
        now[0] += share * part.longest
        return outcome(part, "measured", "", share * part.longest, [line("made", 1.0, "s")])

    monkeypatch.setattr(command, "run_part", taken)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(command, "_machine", lambda device: ("", {"device": device}))
    monkeypatch.setattr(sys, "argv", ["gpu", "--minutes", str(minutes), "--json", str(tmp_path / "gpu.json")])
    assert command.main() == 0
    assert now[0] <= 60 * minutes
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [part["part"] for part in parts] == [part.name for part in PARTS]
    ends = itertools.accumulate(share * part.longest for part in PARTS)
    fits = {part.name for part, end in zip(PARTS, ends, strict=True) if end <= 60 * minutes}
    states = {part["part"]: part["state"] for part in parts}
    assert states["machine"] == "measured" and all(states[name] == "measured" for name in fits)
    assert ("not run" in states.values()) is (len(fits) < len(PARTS))


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.9, "below"), (1.0, "inside"), (2.0, "inside"), (2.1, "above"), (float("nan"), "failed")]
)
def test_a_figure_has_the_range_and_a_verdict(value: float, verdict: str) -> None:
    found = line("copy", value, "TB/s", Range(1.0, 2.0), "once")
    part = {"title": "Copies", "state": "measured", "reason": "", "figures": [found, not_run("product", "no GPU")]}
    text = markdown({"machine": {}, "seconds": 1, "parts": [part]})
    assert f"| copy | {value:.4g} | TB/s | 1 to 2 | {verdict} | once |" in text
    assert "| product |  |  |  | not run | no GPU |" in text


def test_the_time_in_which_nothing_runs_on_the_gpu_is_what_its_events_leave() -> None:
    assert idle_share([(0.0, 2.0), (1.0, 1.5), (2.0, 3.0), (3.5, 4.0), (6.0, 8.0)]) == 2.5 / 8
    assert idle_share([]) == 0.0
    events = [
        {"ph": "X", "cat": kind, "ts": 1e6 * at, "dur": 5e5}
        for at, kind in enumerate(("kernel", "cpu_op", "gpu_memcpy", "cuda_runtime"))
    ]
    file = gzip.compress(json.dumps({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}).encode())
    assert kernels(file, "cuda") == [(0.0, 0.5), (2.0, 2.5)]


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
    compiled, plain = (head_seconds(1024, 151936, each) for each in (True, False))
    assert products < sum(compiled) / 2 < 2 * products < plain.low
    assert attention_rates("FA4", 1024)[0].low < attention_rates("FA4", 32768)[0].low


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "torch finds no CUDA GPU; --device cpu rehearses the parts with small shapes"),
        (("--device", "cpu", "--json", "gpu.md"), "--json gpu.md is no file name that ends in .json; give one"),
        (("--device", "cpu", "--json", "folder.json"), "--json folder.json is no file name that ends in .json"),
        (("--device", "cpu", "--json", "file/gpu.json"), "--json file/gpu.json cannot be written ("),
        (("--device", "cpu", "--json", "table.json"), "--json table.json cannot be written ("),
    ],
    ids=str,
)
def test_what_cannot_be_measured_or_written_is_one_line_before_anything_is_measured(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    for folder in ("folder.json", "table.md"):
        Path(folder).mkdir()
    monkeypatch.setattr(sys, "argv", ["gpu", *words])
    assert command.main() == 2
    out, err = capsys.readouterr()
    (told,) = err.splitlines()
    assert told.startswith(f"benchmarks.gpu: {said}")
    reason = "torch finds no CUDA GPU"
    assert out.splitlines() == ([] if words else [f"{part.name}: not run: {reason}" for part in PARTS])


@pytest.mark.parametrize("minutes", ["0", "-5", "nan", "many"])
def test_minutes_that_are_none_are_refused(minutes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--minutes", minutes])
    with pytest.raises(SystemExit, match="2"):
        command.main()


def test_a_test_that_failed_is_an_exit_code_of_1_and_a_machine_without_git_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "commit" not in command._machine("cpu")[1]
    figure = {"figure": "test_one", "verdict": "failed"}
    monkeypatch.setattr(command, "run_part", lambda part, *_: outcome(part, "measured", "", 1.0, [figure]))
    words = ["gpu", "--device", "cpu", "--part", "attention", "--json", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", words)
    assert command.main() == 1


@pytest.mark.full
def test_all_but_the_engine_is_rehearsed_on_a_machine_without_ray_and_vllm(tmp_path: Path) -> None:
    for name in ("ray", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not there')")
    file = tmp_path / "gpu.json"
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--json", str(file)]
    words += [word for part in PARTS_OF_CPU for word in ("--part", part.name)]
    environment = {"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    document = json.loads(file.read_text())
    assert done.returncode == 0, [part["reason"] for part in document["parts"]]
    found = {each["part"]: {figure["figure"]: figure for figure in each["figures"]} for each in document["parts"]}
    assert list(found) == [part.name for part in PARTS_OF_CPU]
    for figures in found.values():
        assert {figure["verdict"] for figure in figures.values() if "low" in figure} == {"rehearsed"}
        assert all(figure["value"] >= 0 for figure in figures.values() if "value" in figure)
    assert (tmp_path / "gpu" / "step-Qwen3-0.6B.json.gz").stat().st_size > 0
    assert found["attention"]["FA4, rows of 16"]["verdict"] == "not run"
    assert found["weights"]["shared memory to GPU, registered"]["note"] == "needs a CUDA GPU"
    assert found["sharded"]["Qwen3-1.7B: sharded over unsharded"]["value"] > 0
    table = file.with_suffix(".md").read_text()
    assert table == markdown(document) and "### Training steps" in table


@pytest.mark.parametrize(
    ("text", "words", "verdict"),
    [
        ("import pytest\ndef test_one(): pass\ndef test_skips(): pytest.skip('needs a GPU')", (), "inside"),
        ("async def test_awaits(): pass\ndef test_fails(): raise ValueError('wrong')", (), "failed"),
        ("import pytest; pytest.importorskip('no_such_package')", (), "not run"),
        ("def test_one(): pass", ("-k", "another"), "failed"),
    ],
)
def test_the_tests_of_a_part_are_one_line(text: str, words: tuple[str, ...], verdict: str, tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(text)
    given: list[Any] = []
    run_tests(given.append, str(tmp_path / "test_made.py"), *words)
    assert [each["verdict"] for each in given] == [verdict]


def test_without_pytest_the_figures_are_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.parts.importlib.util.find_spec", lambda name: None)
    given: list[Any] = []
    run_tests(given.append, "tests/gpu/test_learn.py")
    assert [(each["verdict"], each["note"]) for each in given] == [("not run", "pytest is not installed")]
