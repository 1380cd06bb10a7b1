"""The quickstart as a user runs it: a process of its own, with real vLLM, Ray and FSDP."""

import json
import re
import shutil
import signal
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from service.observe.metrics_table import TABLE
from service.observe.not_learning import FRESH, MIN_TOKENS, SYMPTOMS
from service.run.folder import LOGS, read_lines
from service.run.records.timeline import timeline_events
from tests.e2e.conftest import ENDLESS, MARK, QUICK, Drive, Driver, LeftOver
from tests.e2e.verdict import judged
from tests.pure.timeline.schema import check_trace, seconds_named
from tests.step_keys import without_meaning
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1000)]

ROOT = Path(__file__).parents[2]
END_SECONDS = 60
EVERY = 2


def get(folder: Path, page: str) -> bytes:
    """A page that the run serves."""
    url = json.loads((folder / "address.json").read_text())["url"]
    with urllib.request.urlopen(f"{url}{page}", timeout=30) as answer:
        body: bytes = answer.read()
    return body


def test_a_short_run_trains_and_leaves_its_folder(finished: Driver, left_over: LeftOver) -> None:
    run, lines = finished, finished.lines()
    assert_the_readme_shows_what_is_said(run.said)
    assert [line["trainer/global_step"] for line in lines] == list(range(1, 9))
    written = set().union(*lines)
    assert {symptom.key for symptom in SYMPTOMS} <= written
    assert {metric.key for metric in TABLE} - written == {"", "eval/lag_intervals"}
    for line in lines:
        assert without_meaning(line) == []
        assert 0 <= line["reward/avg_raw_reward"] <= 1
        assert 0 <= line["async/staleness_max"] <= 4
        assert line["generate/num_seq_after_merge"] < line["generate/num_seq_before_merge"]
        assert np.isfinite([line["policy/policy_loss"], line["policy/grad_norm"]]).all()
        assert line["policy/is_ratio_mean"] == pytest.approx(1, abs=0.2)

    summary = run.summary()
    assert summary["state"] == "finished" and summary["steps"] == 8
    assert summary["tokens"]["trained"] > 0 and summary["tokens"]["open"] == 0
    assert (run.folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert any((run.folder / "tensorboard").iterdir())
    logs = {file.stem: file.read_text() for file in (run.folder / LOGS).iterdir()}
    assert logs.keys() == {"driver", "metrics-hub", "buffer", "generator-0", "trainer-0", "trainer-1"}
    assert all(f"{part} begins" in log for part, log in logs.items() if part != "driver")
    assert "Task was destroyed" not in logs["buffer"]
    assert "EngineCore" in logs["generator-0"]
    assert next(line for line in run.said if line.startswith("finished after 8")).strip() in logs["driver"]
    assert_final_weights_load_and_differ(run.folder)
    assert_the_timeline_agrees_with_the_metrics(
        run.folder, sum(line["timing/wait_for_generation_buffer"] for line in lines)
    )
    assert left_over(MARK, run.mark, END_SECONDS) == {}


def assert_the_timeline_agrees_with_the_metrics(folder: Path, waited: float) -> None:
    trace = {"traceEvents": [json.loads(event) for event in timeline_events(folder)]}
    check_trace(trace)
    assert seconds_named(trace, "trainer", "waiting") == pytest.approx(waited, rel=0.02, abs=0.05)
    rows = {event["cat"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"engine", "rank", "trainer", "trajectories 1", "leases", "commits"} <= rows


def assert_the_readme_shows_what_is_said(said: list[str]) -> None:
    """Each line as far as its first figure, in order; how often a phase that goes on is said again differs, and a
    phase that is only said where it is slow is left out, and so are a symptom, which few steps have by chance, and
    what the node check and the watch of event loops say of a busy machine."""
    (sample,) = re.findall(r"```\n(loading Ray.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    said = [line for line in said if "event loop has been blocked" not in line]
    shown, heard = ([begun(line) for line in lines if begun(line)] for lines in (sample.splitlines(), said))
    by_chance = ("reading the configuration", "learning: ", "NOTE node")
    assert list(dict.fromkeys(shown)) == [line for line in dict.fromkeys(heard) if not line.startswith(by_chance)]


def begun(line: str) -> str:
    """The words of a line before its first figure or path, or before what bound the run.

    >>> begun("starting Ray ... 5 s"), begun("step    5/100  reward 0.3"), begun("bound by training: 57%")
    ('starting Ray', 'step', 'bound by')
    """
    return re.split(r"\d|/|\.\.\.|(?<=^bound by) ", line)[0].strip()


def assert_final_weights_load_and_differ(folder: Path) -> None:
    """The final folder is what any Hugging Face code loads, and not the model that the run began with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder / "final").state_dict()
    assert AutoTokenizer.from_pretrained(folder / "final").chat_template
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


def test_a_run_that_was_killed_and_goes_on_serves_metrics_and_once_terminated_writes_its_final_weights(
    drive: Drive, left_over: LeftOver
) -> None:
    run = drive([*ENDLESS, f"trainer.checkpoint_every={EVERY}"])
    run.until_true((run.folder / "checkpoints" / f"step_{EVERY}" / "manifest.json").exists)
    run.kill()
    assert left_over(MARK, run.mark, END_SECONDS) == {}
    assert not (run.folder / "final").exists()

    before = run.step()
    resumed = drive(["--resume", str(run.folder)])
    after = int(resumed.until("resuming after step").split()[-1])
    assert EVERY <= after <= before
    resumed.until("step ")
    # An actor pushes what it measured within a second or more, so nothing is there at once.
    for name in (b"baton_policy_version", b"baton_batch_padded_sequence_length_last_tokens"):
        until(lambda name=name: name in get(run.folder, "/metrics"))
    until(lambda: roles(get(run.folder, "/status")) >= {"generator", "buffer", "trainer", "driver"})
    status = json.loads(get(run.folder, "/status"))
    assert status["schema"] == 1 and status["run"]["max_steps"] == 100000

    resumed.until_step(before + 1)
    resumed.stop()
    assert_stopped_in_order(resumed, left_over)
    judged(run.folder, resumed.step(), stopped=True)


def assert_stopped_in_order(run: Driver, left_over: LeftOver) -> None:
    assert left_over(MARK, run.mark, END_SECONDS) == {}
    assert (run.folder / "final" / "model.safetensors").is_file()
    assert run.summary()["state"] == "stopped"


def roles(status: bytes) -> set[str]:
    """Of the actors that have said something."""
    return {actor["role"] for actor in json.loads(status)["actors"]}


@pytest.mark.full
def test_a_run_whose_terminal_is_closed_ends_in_order(drive: Drive, left_over: LeftOver) -> None:
    run = drive(ENDLESS)
    run.until("training:")
    run.is_closed = True
    run.until_true(lambda: run.process.stdout is not None and run.process.stdout.closed)
    run.process.send_signal(signal.SIGHUP)
    assert run.process.wait(120) == 128 + signal.SIGHUP
    assert_stopped_in_order(run, left_over)


TWO_WORKERS = [*QUICK, "generator.tensor_parallel_size=2", "weights.verify=true"]


def assert_engine_and_trainer_agree(run: Driver, steps: int) -> None:
    """Within the tolerance of `weights.verify`, in each token of the newest policy."""
    assert [line["trainer/global_step"] for line in run.lines()] == [*range(1, steps + 1)]
    fresh = [line for line in run.lines() if line.get(f"{FRESH}/tokens", 0) >= MIN_TOKENS]
    assert fresh and max(line[f"{FRESH}/differing_fraction"] for line in fresh) == 0


def test_an_engine_of_two_workers_serves_what_the_trainer_publishes_and_the_run_evaluates_it(
    drive: Drive, left_over: LeftOver
) -> None:
    evaluated = ["data.eval_every=1", "data.eval_make_rows=8", "data.eval_samples=2"]
    run = drive([*TWO_WORKERS, *evaluated, "run.max_steps=2"])
    run.finish()
    assert_engine_and_trainer_agree(run, 2)
    evaluations = list(read_lines(run.folder / "evaluations.jsonl"))
    assert [found["step"] for found in evaluations] == [0, 1, 2]
    for found in evaluations:
        assert (found["prompts"], found["trajectories"], found["lost_trajectories"]) == (8, 16, 0)
    assert left_over(MARK, run.mark, END_SECONDS) == {}


@pytest.mark.full
@pytest.mark.parametrize("policy", ["dense", "mixture", "adapter"])
def test_each_kind_of_policy_is_the_same_in_two_engines_of_two_workers_as_in_the_trainer(
    drive: Drive, finished: Driver, tmp_path: Path, policy: str
) -> None:
    settings = ["model.lora.rank=4"] if policy == "adapter" else []
    if policy == "mixture":
        folder = tmp_path / "mixture"
        shutil.copytree(finished.folder / "model", folder)
        dense = json.loads((folder / "config.json").read_text())
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        config = Qwen3MoeConfig(**{name: dense[name] for name in dense if name not in ("model_type", "architectures")})
        config.update(experts)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        settings = ["model.make=null", f"model.path={folder}"]
    run = drive([*TWO_WORKERS, *settings, "generator.engines=2", "run.max_steps=10"])
    run.finish()
    assert_engine_and_trainer_agree(run, 10)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(drive: Drive, seed: int) -> None:
    run = drive([f"run.seed={seed}", "metrics.port=0"])
    run.finish()
    assert run.summary()["reward_gain"] >= 0.3
    assert run.summary()["seconds"] <= 300
