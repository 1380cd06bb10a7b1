"""The driver's loop with a buffer, a trainer and a hub that are none, and no generators."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.buffer.actor import LeasedBatch
from actors.driver import coordinator as driving_loop
from actors.driver.cluster import Cluster
from actors.driver.coordinator import Coordinator
from actors.observe import metrics_hub
from actors.observe.metrics_hub import TARGETS_SECONDS
from actors.weights.weight_source import TrainerLost
from service.config import load_config
from service.errors import RunFailed
from service.handoff.steps.limits import Routing
from service.handoff.verbs import Wait, WaitReason
from service.learn.learner import StepReport
from service.run.folder import SUMMARY, TARGETS, warmed_model, write_address
from service.run.inputs import Prepared
from service.run.supervisor import Life, Supervisor
from service.run.writer import RunWriter
from tests.pure.actors.fakes import Method

FRUITLESS = "591 groups finished, all filtered: every return was 0.0"
MEASURED = {"reward/avg_raw_reward": 0.5, "async/staleness_mean": 0.0, "generate/batch_padded_seq_len": 8.0}
LEASED = LeasedBatch(0, MEASURED, (), [], [])


def answering(answer: Any = None) -> Callable[..., Any]:
    """A coroutine function that gives the same answer to every call; of a list, one element a call."""

    async def answers(*_: Any) -> Any:
        return answer.pop(0) if isinstance(answer, list) else answer

    return answers


LIVES = Method(answering(Life("a process", is_set_up=True)))


def cluster_of(folder: Path, buffer: dict[str, Any], trainer: dict[str, Any]) -> Cluster:
    """Without generators; `buffer`: the answers by method, `trainer`: the methods."""
    folder.mkdir(parents=True, exist_ok=True)
    write_address(folder, "http://127.0.0.1:9400")
    return Cluster(
        hub=SimpleNamespace(
            start=Method(answering("http://127.0.0.1:9400")), push=SimpleNamespace(remote=lambda *_: None), life=LIVES
        ),
        buffer=SimpleNamespace(life=LIVES, **{name: Method(answering(answer)) for name, answer in buffer.items()}),
        generators=(),
        place=answering(None),
        trainer=SimpleNamespace(named={}, **trainer),  # type: ignore[arg-type]
    )


def drive(folder: Path, leases: list[LeasedBatch | Wait]) -> None:
    """Run until the buffer says that all groups are filtered, which ends the run."""
    config = load_config(["configs/quickstart.yaml"], ["model.warm_start=null", "trainer.checkpoint_every=0"])
    fruitless = Wait(WaitReason.FILTERED, FRUITLESS, 0.0)
    buffer = {"ready": None, "join": 1, "lease": [*leases, fruitless], "commit": None}
    trainer = {"load": None, "weights": None, "step": StepReport(True, None, {})}
    cluster = cluster_of(folder / "run", buffer, {name: answering(answer) for name, answer in trainer.items()})
    run, prepared = RunWriter(folder / "run"), Prepared(folder / "rows.jsonl", [], folder, 8, None)
    try:
        with pytest.raises(RunFailed, match=f"^{FRUITLESS}; nothing is left to learn from$"):
            asyncio.run(Coordinator(config, cluster, run, prepared, lambda line: None, None).run())
    finally:
        run.close()


def test_a_run_that_is_stopped_while_it_writes_its_final_weights_has_finished(tmp_path: Path) -> None:
    config = load_config(
        ["configs/quickstart.yaml"], ["model.warm_start=null", "trainer.checkpoint_every=0", "run.max_steps=2"]
    )
    said: list[str] = []
    status = {"tokens": {}, "length_distance": 0.0, "token_length_distance": 0.0, "lengths": []}
    buffer = {"ready": None, "join": 1, "lease": LEASED, "commit": None, "covered": None, "end": [[]], "stop": None}
    driving: list[Coordinator] = []

    async def export(folder: Path) -> None:
        assert not run.has_final
        driving[0].stop(signal.SIGTERM)

    trainer = {"load": answering(), "weights": answering(), "step": answering(StepReport(True, None, {}))}
    cluster = cluster_of(tmp_path / "run", buffer | {"status": status}, trainer | {"export": export})
    run, prepared = RunWriter(tmp_path / "run"), Prepared(tmp_path / "rows.jsonl", [], tmp_path, 8, None)
    driving.append(Coordinator(config, cluster, run, prepared, said.append, None))
    try:
        asyncio.run(driving[0].run())
    finally:
        run.close()
    assert run.has_final and driving[0].stopped_by == signal.SIGTERM
    assert "stopping: all 2 steps are done, the final weights are still written ..." in said
    assert any(line.startswith("finished after 2 optimizer steps") for line in said)
    assert json.loads((tmp_path / "run" / SUMMARY).read_text())["state"] == "finished"


@pytest.mark.parametrize("lost", [[], ["generator-0"]])
def test_a_run_that_gets_no_mini_batch_ends_and_names_the_generators_that_did_not_come_back(
    lost: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["model.warm_start=null", "trainer.checkpoint_every=0", "run.stall_deadline=0.05"]
    waiting = Wait(WaitReason.GROUPS, "0 of 16 groups are complete", 0.0)
    buffer = {"ready": None, "join": 1, "lease": waiting}
    cluster = cluster_of(tmp_path / "run", buffer, {"load": answering(), "weights": answering()})
    run, prepared = RunWriter(tmp_path / "run"), Prepared(tmp_path / "rows.jsonl", [], tmp_path, 8, None)
    coordinator = Coordinator(
        load_config(["configs/quickstart.yaml"], settings), cluster, run, prepared, lambda line: None, None
    )
    monkeypatch.setattr(Supervisor, "lost", lambda self: lost)
    named = "; generator-0 did not come back: .*no other has room .*" if lost else ""
    try:
        with pytest.raises(RunFailed, match=f"^no mini-batch for 0 s: 0 of 16 groups are complete{named}$"):
            asyncio.run(asyncio.wait_for(coordinator.run(), 30))
    finally:
        run.close()


def test_every_process_of_a_run_is_asked_whether_it_lives_scorers_and_frozen_roles_included(tmp_path: Path) -> None:
    settings = ["model.warm_start=null", "trainer.checkpoint_every=0"]
    settings += ["scorers={judge: {use: 'math:sqrt', workers: 2}}", "roles={critic: {mode: frozen, model: critic}}"]
    config = load_config(["configs/quickstart.yaml"], settings)
    asked: set[str] = set()

    def asks(name: str, **methods: Any) -> SimpleNamespace:
        async def life() -> Life:
            asked.add(name)
            return Life(name, is_set_up=True)

        return SimpleNamespace(life=Method(life), ready=Method(answering()), **methods)

    async def weights(*_: Any) -> None:
        while len(asked) < 7:
            await asyncio.sleep(0.01)
        raise RunFailed("all were asked")

    url, pushes = Method(answering("http://127.0.0.1:9400")), SimpleNamespace(remote=lambda *_: None)
    run = RunWriter(tmp_path / "run")
    write_address(run.path, "http://127.0.0.1:9400")
    cluster = Cluster(
        hub=asks("metrics-hub", start=url, push=pushes),
        buffer=asks("buffer", join=Method(answering(1))),
        generators=(),
        place=answering(),
        trainer=SimpleNamespace(  # type: ignore[arg-type]
            named={name: asks(name) for name in ("trainer-0", "trainer-1")}, load=answering(), weights=weights
        ),
        scorers={name: asks(name) for name in ("scorer-judge-0", "scorer-judge-1")},
        roles={"role-critic": asks("role-critic")},
    )
    prepared = Prepared(tmp_path / "rows.jsonl", [], tmp_path, 8, None)
    with pytest.raises(RunFailed, match="all were asked"):
        asyncio.run(asyncio.wait_for(Coordinator(config, cluster, run, prepared, lambda line: None, None).run(), 30))
    run.close()


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
    config = load_config(
        ["configs/quickstart.yaml"], ["model.warm_start=null", "trainer.checkpoint_every=2", "run.max_restarts=2"]
    )
    said: list[str] = []
    whole = [0, 2]

    async def finish_save() -> None:
        if not whole:
            raise TrainerLost("the trainer failed (OSError: Read-only file system)")
        whole.pop()

    status = dict.fromkeys(("journal_start", "journal_synced", "accepted_tokens"), 0)
    buffer = {"ready": None, "join": 1, "lease": LEASED, "commit": None, "covered": None, "status": status}
    names = ("load", "weights", "save", "restart", "restore")
    trainer = {name: answering() for name in names} | {"step": answering(StepReport(True, None, {}))}
    cluster = cluster_of(tmp_path / "run", buffer, trainer | {"finish_save": finish_save})
    run, prepared = RunWriter(tmp_path / "run"), Prepared(tmp_path / "rows.jsonl", [], tmp_path, 8, None)
    try:
        with pytest.raises(RunFailed, match=r"^the trainer failed 3 times; the last time: .*Read-only file system"):
            asyncio.run(Coordinator(config, cluster, run, prepared, said.append, None).run())
    finally:
        run.close()
    assert len([line for line in said if line.endswith("the trainer restarts from step 2")]) == 2


@pytest.mark.parametrize(("is_remedied", "restarts"), [(True, 4), (False, 2)])
def test_a_lack_of_memory_that_has_a_remedy_does_not_count_as_a_failure_of_the_trainer(
    tmp_path: Path, is_remedied: bool, restarts: int
) -> None:
    settings = ["run.max_restarts=2", "trainer.checkpoint_every=0", "model.warm_start=null"]
    config, said = load_config(["configs/quickstart.yaml"], settings), list[str]()
    lacks = [TrainerLost("the trainer failed (out of memory)", is_remedied)] * 4 + [TrainerLost("it died")] * 3

    async def step(_: Any) -> None:
        raise lacks.pop(0)

    status = dict.fromkeys(("journal_start", "journal_synced", "accepted_tokens"), 0)
    buffer = {"ready": None, "join": 1, "lease": LEASED, "status": status}
    trainer = {name: answering() for name in ("load", "weights", "restart")} | {"step": step}
    cluster = cluster_of(tmp_path / "run", buffer, trainer)
    run, prepared = RunWriter(tmp_path / "run"), Prepared(tmp_path / "rows.jsonl", [], tmp_path, 8, None)
    try:
        with pytest.raises(RunFailed, match=r"^the trainer failed 3 times; the last time: "):
            asyncio.run(Coordinator(config, cluster, run, prepared, said.append, None).run())
    finally:
        run.close()
    told = [line for line in said if line == "the trainer failed (out of memory); the trainer restarts from step 0"]
    assert len(told) == restarts
    assert len([line for line in said if line.endswith("the trainer restarts from step 0")]) == (
        6 if is_remedied else 2
    )


@pytest.mark.parametrize("lora", [True, False])
def test_an_adapter_is_added_to_what_the_warm_start_of_all_weights_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    """Trainer and engines begin with it; without an adapter the warm start goes on with what the trainer has loaded."""
    monkeypatch.setattr(driving_loop, "demonstrations", lambda *_: [])
    config = load_config(["configs/quickstart.yaml"], ["model.lora={}"] if lora else [])
    run, trainer, hub = RunWriter(tmp_path / "run"), Trainer(), Method(answering("http://127.0.0.1:9400"))
    write_address(run.path, "http://127.0.0.1:9400")
    warmed = warmed_model(config.model, run.path)
    prepared = Prepared(tmp_path / "rows.jsonl", [], tmp_path, 8, Routing((), 0, 0), warmed_model=warmed)
    cluster = Cluster(
        hub=SimpleNamespace(start=hub, push=SimpleNamespace(remote=lambda *_: None), life=LIVES),
        buffer=SimpleNamespace(life=LIVES, **{name: Method(answering(1)) for name in ("ready", "join")}),
        generators=(),
        place=answering(None),
        trainer=trainer,  # type: ignore[arg-type]
    )
    with pytest.raises(RunFailed, match="far enough"):
        asyncio.run(Coordinator(config, cluster, run, prepared, lambda line: None, None).run())
    run.close()
    asked = [call for call in trainer.asked if call[0] != "weights"]
    if lora:
        assert warmed == run.path / "warm_start"
        assert asked == [
            ("load", tmp_path, ("adapter", False)),
            ("warm_start", []),
            ("export", warmed),
            ("restart", warmed),
        ]
    else:
        assert asked == [("load", tmp_path), ("warm_start", [])]


def test_the_weights_of_the_best_evaluation_so_far_are_kept(tmp_path: Path) -> None:
    """Scores of steps 0 to 3; an equal score is no better."""
    scores = [0.2, 0.5, 0.5, 0.4]
    sets = ["data.eval_make_rows=2", "data.eval_every=1", "run.keep_best=eval/made/avg_score", "run.max_steps=3"]
    config = load_config(["configs/quickstart.yaml"], ["model.warm_start=null", "trainer.checkpoint_every=0", *sets])
    run, prepared = RunWriter(tmp_path / "run"), Prepared(tmp_path / "rows.jsonl", [], tmp_path, 8, None)
    status = {"tokens": {}, "length_distance": 0.0, "token_length_distance": 0.0, "lengths": []}
    buffer = {"ready": None, "join": 1, "lease": LEASED, "commit": None, "covered": None, "end": [[]], "stop": None}
    trainer, evaluated = Trainer(), list[int]()
    made = {"load": answering(), "weights": answering(), "step": answering(StepReport(True, None, {}))}
    cluster = cluster_of(run.path, buffer | {"status": status}, made | {"export": trainer.export})
    coordinator = Coordinator(config, cluster, run, prepared, lambda line: None, None)

    async def at(step: int) -> None:
        evaluated.append(step)
        run.append_evaluations(step, [{"set": "made", "avg_score": scores[step]}, {"set": "x", "avg_score": step}])
        trainer.asked.append(("evaluated", step))

    coordinator._evaluations.at = at  # type: ignore[method-assign]
    try:
        asyncio.run(coordinator.run())
    finally:
        run.close()
    best = ("export", run.path / "best")
    assert trainer.asked == [
        *(("evaluated", 0), best, ("evaluated", 1), best),
        *(("evaluated", 2), ("evaluated", 3), ("export", run.path / "final")),
    ]


def test_a_run_of_which_every_group_is_filtered_ends_with_what_the_buffer_says(tmp_path: Path) -> None:
    drive(tmp_path, [])


@pytest.mark.parametrize(("seconds", "n_lookups"), [(TARGETS_SECONDS, 1), (0.0, 3)])
def test_the_nodes_of_the_cluster_are_looked_up_off_the_loop_and_not_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, n_lookups: int
) -> None:
    threads: list[threading.Thread] = []

    def nodes() -> list[dict[str, Any]]:
        threads.append(threading.current_thread())
        return [{"targets": [f"10.0.0.{len(threads)}:8080"], "labels": {}}]

    monkeypatch.setattr(metrics_hub, "TARGETS_SECONDS", seconds)
    monkeypatch.setattr(metrics_hub, "ray_targets", nodes)
    drive(tmp_path, [LEASED, LEASED])
    assert len(threads) == n_lookups and threading.main_thread() not in threads
    (file,) = (tmp_path / TARGETS).iterdir()
    own, node = json.loads(file.read_text())
    assert (own["labels"]["run"], own["labels"]["folder"]) == ("run", str(tmp_path / "run"))
    assert (own["targets"], node["targets"]) == (["127.0.0.1:9400"], [f"10.0.0.{n_lookups}:8080"])
