"""An evaluation with engines and a cluster that are none."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.driver import evaluate_model as command
from actors.driver import placement
from actors.driver.node_check import RunFiles
from actors.driver.placement import Bundle, reserve
from actors.driver.prepare import prepare
from service.config import load_config, resolved_yaml
from service.errors import RunFailed
from service.evaluation.scores import EvalTrajectory
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.run.checkpoints import TRAINER, Checkpoints
from service.run.folder import CHECKPOINTS, CONFIG
from service.run.preparing.eval_target import eval_target
from tests.pure.actors.fakes import Method

QUICKSTART = "configs/quickstart.yaml"


class Remote:
    """Stands for `ray.remote(cls)`: takes the arguments that the class takes, and makes an engine that scores 1."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def options(self, **_: Any) -> Remote:
        return self

    def remote(self, *arguments: Any) -> Any:
        inspect.signature(self._cls).bind(*arguments)

        async def nothing() -> None: ...

        async def evaluate(*_: Any) -> list[EvalTrajectory]:
            return [EvalTrajectory("p0", 1.0, 1, 4, "stop")]

        return SimpleNamespace(start=Method(nothing), stop=Method(nothing), evaluate=Method(evaluate))


@pytest.mark.parametrize("of_checkpoint", [False, True])
def test_every_engine_of_an_evaluation_is_made_and_scores_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_checkpoint: bool
) -> None:
    """The weights of a checkpoint become a Hugging Face folder first."""

    async def room(*_: Any) -> None: ...

    config = load_config([QUICKSTART], ["data.eval_make_rows=2", "generator.engines=2"])
    stand_ins: dict[str, Callable[..., Any]] = {
        "ray_session": lambda *_: nullcontext(),
        "gpus_each": lambda: 0,
        "reserve": room,
        "engine_options": lambda *_: {},
    }
    checked: list[RunFiles] = []
    stand_ins["check_nodes"] = lambda room, bundles, files: checked.append(files)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(command, name, stand_in)
    monkeypatch.setattr(command.ray, "remote", Remote)
    model = prepare(config, tmp_path).model_folder
    monkeypatch.chdir(model.parent)
    target = Path(model.name)
    if of_checkpoint:
        (tmp_path / CONFIG).write_text(resolved_yaml(config))
        checkpoints = Checkpoints(tmp_path / CHECKPOINTS, keep=1)
        learner = Learner(LearnSettings.of(config), model, torch.device("cpu"), 0, 1)
        learner.save(checkpoints.begin(3) / TRAINER)
        checkpoints.finish(3, 0)
        target = checkpoints.path(3)
    with command.prepared_evaluation(config, eval_target(target), lambda line: None) as prepared:
        evaluations = command.evaluate(prepared, lambda line: None)
    (files,) = checked
    folders = {path.parent for path in map(Path, files.sizes) if path.name == "config.json"}
    assert len(folders) == 1 and (folders == {model}) != of_checkpoint, "engines of other nodes have another folder"
    assert {path.name for path in map(Path, files.sizes)} > {"model.safetensors", "tokenizer.json"}
    assert sum(path.endswith(".jsonl") for path in files.sizes) == 1 and all(
        map(Path.is_absolute, map(Path, files.sizes))
    )
    assert [(of.n_trajectories, of.scores["avg_score"]) for of in evaluations] == [(2, 1.0)]


def test_a_stop_signal_ends_the_wait_for_room_in_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    within = 300.0
    full = SimpleNamespace(wait=lambda seconds: time.sleep(seconds))
    monkeypatch.setenv("RAY_ADDRESS", "pretended")
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: full)
    monkeypatch.setattr(placement, "remove_placement_group", lambda room: None)  # Ray would start itself for it
    monkeypatch.setattr(placement, "nodes", list)
    monkeypatch.setattr(placement, "QUIET_SECONDS", 0.05)

    async def stopped() -> None:
        said = asyncio.Event()
        waiting = asyncio.ensure_future(reserve([Bundle({"CPU": 1.0})], within, lambda line: said.set()))
        await asyncio.wait_for(said.wait(), 60)
        waiting.cancel()
        await asyncio.wait([waiting])

    began = time.monotonic()
    asyncio.run(stopped())
    assert time.monotonic() - began < within / 2


def test_room_that_was_not_there_in_time_is_not_asked_for_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    full, removed = SimpleNamespace(wait=lambda seconds: None), list[object]()
    monkeypatch.setenv("RAY_ADDRESS", "pretended")
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: full)
    monkeypatch.setattr(placement, "remove_placement_group", removed.append)
    monkeypatch.setattr(placement, "nodes", list)
    with pytest.raises(RunFailed, match=r"no room in the Ray cluster for 0\.01 s: the run needs 1 x \(1 CPU\)"):
        asyncio.run(reserve([Bundle({"CPU": 1.0})], 0.01, lambda line: None))
    assert removed == [full]
