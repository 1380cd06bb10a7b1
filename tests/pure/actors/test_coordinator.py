"""The driver's loop with a buffer, a trainer and a hub that are none, and no generators."""

import asyncio
import json
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.buffer.actor import LeasedBatch
from actors.driver import coordinator as driving_loop
from actors.driver.cluster import Cluster
from actors.driver.coordinator import Coordinator
from actors.driver.observer import RunObserver
from actors.generator.generator_pool import GeneratorPool
from actors.weights.part import TrainerLost
from service.config import load_config
from service.errors import RunFailed
from service.handoff.steps.values import Routing
from service.handoff.verbs import Wait, WaitReason
from service.learn.learner import StepReport
from service.run.checkpoints import Manifest
from service.run.folder import SUMMARY, warmed_model, write_address
from service.run.liveness.supervisor import Life, Supervisor
from service.run.preparing.inputs import Prepared
from service.run.records.writer import RunWriter
from tests.pure.actors.fakes import Method, answering

MEASURED = {"reward/avg_raw_reward": 0.5, "async/staleness_mean": 0.0, "generate/batch_padded_seq_len": 8.0}
LEASED = LeasedBatch(0, MEASURED, (), [], [])


LIVES = answering(Life("a process", is_set_up=True))
URL = "http://127.0.0.1:9400"
PUSH = SimpleNamespace(remote=lambda *_: None)


def cluster_of(folder: Path, buffer: dict[str, Any], trainer: dict[str, Any]) -> Cluster:
    """Without generators; `buffer`: the answers by method, `trainer`: the methods."""
    folder.mkdir(parents=True, exist_ok=True)
    write_address(folder, URL)
    return Cluster(
        hub=SimpleNamespace(start=answering(URL), push=PUSH, binding=answering(None), life=LIVES),
        buffer=SimpleNamespace(life=LIVES, **{name: answering(answer) for name, answer in buffer.items()}),
        generators=(),
        place=answering(None),
        trainer=SimpleNamespace(named={}, **trainer),  # type: ignore[arg-type]
    )


@contextmanager
def coordinating(
    folder: Path,
    cluster: Cluster,
    *settings: str,
    said: list[str] | None = None,
    resume_from: Manifest | None = None,
    **prepared: Any,
) -> Iterator[tuple[Coordinator, RunWriter]]:
    """The loop of a quick start without checkpoints, in the folder `run`, whose files are closed in the end."""
    config = load_config(["configs/quickstart.yaml"], ["trainer.checkpoint_every=0", *settings])
    run = RunWriter(folder / "run")
    ready = Prepared(folder / "rows.jsonl", [], folder, 8, **{"routing": None, **prepared})
    try:
        yield Coordinator(config, cluster, run, ready, [].append if said is None else said.append, resume_from), run
    finally:
        run.close()


COLD = "model.warm_start=null"
LOADS = {"load": answering(), "weights": answering()}
STEPS = LOADS | {"step": answering(StepReport(True, None, {}))}
LEASES: dict[str, Any] = {"ready": None, "join": 1, "lease": LEASED, "commit": None, "covered": None, "lost": ()}
TOLD = dict.fromkeys(("journal_start", "journal_synced", "accepted_tokens"), 0)
ENDED = {"tokens": {}, "length_distance": 0.0, "token_length_distance": 0.0, "lengths": []}


def fails(folder: Path, cluster: Cluster, reason: str, *settings: str, **more: Any) -> None:
    """Run until the run ends with this reason."""
    with coordinating(folder, cluster, *settings, **more) as (coordinator, _), pytest.raises(RunFailed, match=reason):
        asyncio.run(asyncio.wait_for(coordinator.run(), 120))


def test_a_run_that_is_stopped_while_it_writes_its_final_weights_has_finished(tmp_path: Path) -> None:
    said: list[str] = []

    async def export(folder: Path) -> None:
        assert not run.has_final
        driving.stop(signal.SIGTERM)

    buffer = LEASES | {"end": [[]], "stop": None, "status": ENDED}
    cluster = cluster_of(tmp_path / "run", buffer, STEPS | {"export": export})
    with coordinating(tmp_path, cluster, COLD, "run.max_steps=2", said=said) as (driving, run):
        asyncio.run(driving.run())
    assert run.has_final and driving.stopped_by == signal.SIGTERM
    assert "stopping: all 2 steps are done, the final weights are still written ..." in said
    assert any(line.startswith("finished after 2 optimizer steps") for line in said)
    assert json.loads((tmp_path / "run" / SUMMARY).read_text())["state"] == "finished"


@pytest.mark.parametrize("grace", [0.0, 0.3, 1e6])
def test_the_end_of_a_run_lets_sessions_end_for_a_while_and_says_how_many_it_cut(
    grace: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a long grace the sessions end by themselves, and the run with them; otherwise as the generators stop."""
    open_ones, drained, stopped, said = ["one", "two"], asyncio.Event(), asyncio.Event(), list[str]()

    async def drain(reason: str) -> None:
        drained.set()

    async def generate(self: GeneratorPool) -> None:
        ended = asyncio.Event()
        self._keepers["generator-0"] = asyncio.ensure_future(ended.wait())
        await drained.wait()
        await (stopped.wait() if grace < 1 else asyncio.sleep(0.2))
        open_ones.clear()
        ended.set()

    async def statuses(self: GeneratorPool) -> list[dict[str, Any]]:
        return [
            {key: {} for key in ("counts", "failures", "refusals")}
            | {"sessions": len(open_ones), "name": "generator-0", "elapsed_seconds": 1.0, "wait_seconds": 0.0}
        ]

    async def stop(self: GeneratorPool, resumable: bool) -> None:
        drained.set()
        stopped.set()

    for replacement in (generate, statuses, stop):
        monkeypatch.setattr(GeneratorPool, {"generate": "run"}.get(name := replacement.__name__, name), replacement)
    cluster = cluster_of(
        tmp_path / "run", LEASES | {"end": [[]], "stop": None, "status": ENDED}, STEPS | {"export": answering()}
    )
    cluster.buffer.drain = Method(drain)
    settings = [COLD, "run.max_steps=1", f"agents.end_grace={grace}"]
    with coordinating(tmp_path, cluster, *settings, said=said) as (driving, _):
        asyncio.run(driving.run())
    cut = json.loads((tmp_path / "run" / SUMMARY).read_text()).get("sessions_cut", 0)
    assert cut == (0 if grace > 1 else 2)
    assert ("sessions of agents that were open and were cut: 2" in said) is bool(cut)


@pytest.mark.parametrize("lost", [[], ["generator-0"]])
def test_a_run_that_gets_no_mini_batch_ends_and_names_the_generators_that_did_not_come_back(
    lost: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Wait(WaitReason.GROUPS, "0 of 16 groups are complete", 0.0)
    cluster = cluster_of(tmp_path / "run", LEASES | {"lease": waiting}, LOADS)
    monkeypatch.setattr(Supervisor, "lost", lambda self: lost)
    named = "; generator-0 did not come back: .*no other has room .*" if lost else ""
    reason = f"^no mini-batch for 0 s: 0 of 16 groups are complete{named}$"
    fails(tmp_path, cluster, reason, COLD, "run.stall_deadline=0.05")


class Trainer:
    """Writes down what it was asked."""

    named: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def answer(*arguments: Any, **named: Any) -> float:
            self.asked.append((method, *arguments, *named.items()))
            if method == "weights":
                raise RunFailed("far enough")
            return 0.5

        return answer


def test_a_trainer_that_fails_at_the_same_checkpoint_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """Else it would repeat the steps before that checkpoint for ever, as on a disk that has become read-only."""
    said: list[str] = []
    saves = answering([None, *[TrainerLost("the trainer failed (OSError: Read-only file system)")] * 3])
    trainer = STEPS | {name: answering() for name in ("save", "restart", "restore")} | {"finish_save": saves}
    cluster = cluster_of(tmp_path / "run", LEASES | {"status": TOLD}, trainer)
    settings = [COLD, "trainer.checkpoint_every=2", "run.max_restarts=2"]
    reason = r"^the trainer failed 3 times; the last time: .*Read-only file system"
    fails(tmp_path, cluster, reason, *settings, said=said)
    assert len([line for line in said if re.search("the trainer restarts from step [1-9]", line)]) == 2


def test_a_checkpoint_is_begun_after_the_line_of_its_step(tmp_path: Path) -> None:
    """A run that is killed at any moment, and resumes from its newest checkpoint, lacks no line."""
    saved: list[tuple[str, int]] = []

    async def save(folder: Path) -> None:
        saved.append((folder.parent.name.rpartition("_")[2], run.step))

    trainer = STEPS | {"save": save, "finish_save": answering(), "export": answering()}
    buffer = LEASES | {"end": [[]], "stop": None, "status": TOLD | ENDED}
    settings = [COLD, "trainer.checkpoint_every=1", "run.max_steps=2"]
    with coordinating(tmp_path, cluster_of(tmp_path / "run", buffer, trainer), *settings) as (coordinator, run):
        asyncio.run(coordinator.run())
    assert ("2", 2) in saved and {*saved} <= {("1", 1), ("2", 2)}  # the first waits for that of step 0 if that is slow


@pytest.mark.parametrize(("is_remedied", "restarts"), [(True, 4), (False, 2)])
def test_a_lack_of_memory_that_has_a_remedy_does_not_count_as_a_failure_of_the_trainer(
    tmp_path: Path, is_remedied: bool, restarts: int
) -> None:
    said: list[str] = []
    lacks = [TrainerLost("the trainer failed (out of memory)", is_remedied)] * 4 + [TrainerLost("it died")] * 3
    trainer = LOADS | {"restart": answering(), "step": answering(lacks)}
    cluster = cluster_of(tmp_path / "run", LEASES | {"status": TOLD}, trainer)
    fails(tmp_path, cluster, r"^the trainer failed 3 times; the last time: ", COLD, "run.max_restarts=2", said=said)
    told = [line for line in said if line.endswith("; the trainer restarts from step 0")]
    assert len([line for line in told if "out of memory" in line]) == restarts
    assert len(told) == (6 if is_remedied else 2)


@pytest.mark.parametrize("lora", [True, False])
def test_an_adapter_is_added_to_what_the_warm_start_of_all_weights_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """Trainer and engines begin with it; without an adapter the warm start goes on with what the trainer has loaded."""
    monkeypatch.setattr(driving_loop, "demonstrations", lambda *_: [])
    settings = ["model.lora={}"] if lora else []
    warmed = warmed_model(load_config(["configs/quickstart.yaml"], settings).model, tmp_path / "run")
    trainer: Any = Trainer()
    cluster = replace(cluster_of(tmp_path / "run", LEASES, {}), trainer=trainer)
    prepared = {"routing": Routing((), 0, 0), "warmed_model": warmed}
    fails(tmp_path, cluster, "far enough", *settings, **prepared)
    asked = [call for call in trainer.asked if call[0] != "weights"]
    if lora:
        assert warmed == tmp_path / "run" / "warm_start"
        assert asked == [
            ("load", tmp_path, ("adapter", False)),
            ("warm_start", []),
            ("export", warmed),
            ("restart", warmed),
        ]
    else:
        assert asked == [("load", tmp_path), ("warm_start", [])]


def test_a_run_that_resumes_before_its_first_checkpoint_of_files_begins_with_the_model_again(tmp_path: Path) -> None:
    """Its status has the step of the checkpoint from the start on."""
    trainer: Any = Trainer()
    cluster = replace(cluster_of(tmp_path / "run", LEASES | {"status": TOLD, "resume": None}, {}), trainer=trainer)
    pushed: list[Any] = []
    cluster.hub.push = SimpleNamespace(remote=lambda *of: pushed.append(of))
    manifest = Manifest(step=7, journal_position=0, files={})
    fails(tmp_path, cluster, "far enough", resume_from=manifest)
    assert [method for method, *_ in trainer.asked] == ["load", "weights"]
    shown = [report["policy_version"] for _, _, reports, *_ in pushed for part, report in reports if part == "run"]
    assert shown[0] == {"incarnation": 0, "step": 7}


def test_the_weights_of_the_best_evaluation_so_far_are_kept(tmp_path: Path) -> None:
    """Scores of steps 0 to 3; an equal score is no better."""
    scores = [0.2, 0.5, 0.5, 0.4]
    sets = ["data.eval_make_rows=2", "data.eval_every=1", "run.keep_best=eval/made/avg_score", "run.max_steps=3"]
    buffer = LEASES | {"end": [[]], "stop": None, "status": ENDED}
    trainer, evaluated = Trainer(), list[int]()
    cluster = cluster_of(tmp_path / "run", buffer, STEPS | {"export": trainer.export})

    async def at(step: int) -> None:
        evaluated.append(step)
        run.append_evaluations(step, [{"set": "made", "avg_score": scores[step]}, {"set": "x", "avg_score": step}])
        trainer.asked.append(("evaluated", step))

    with coordinating(tmp_path, cluster, COLD, *sets) as (coordinator, run):
        coordinator._evaluations.at = at  # type: ignore[method-assign]
        asyncio.run(coordinator.run())
    best = ("export", tmp_path / "run" / "best")
    assert trainer.asked == [
        *(("evaluated", 0), best, ("evaluated", 1), best),
        *(("evaluated", 2), ("evaluated", 3), ("export", tmp_path / "run" / "final")),
    ]


@pytest.mark.parametrize(("seconds", "ends"), [(20.0, False), (600.0, True), (math.inf, True)])
def test_a_scorer_ends_the_run_only_if_it_was_away_for_long_or_never_there(seconds: float, ends: bool) -> None:
    config = load_config([], ["data.make_rows=8", "model.make={hidden_size: 128, num_layers: 2}"])
    observer = SimpleNamespace(_failures=SimpleNamespace(name_scorers=lambda _: None), _config=config)
    with pytest.raises(RunFailed, match="503") if ends else nullcontext():
        RunObserver.scorers_failed(observer, {("judge", "http"): "503"}, {"judge": (999, seconds)}, 7.0)  # type: ignore[arg-type]
    assert observer.scored == 7.0
