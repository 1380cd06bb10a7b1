"""Runs made to not learn, each for one reason: that reason is named first, and a healthy run is not blamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.config import AlgorithmConfig, Config, ModelConfig, TrainerConfig
from service.config.core_settings import batch_settings
from service.handoff.batches.batch import batch_of_rank, form_mini_batch
from service.handoff.leases import with_filtered
from service.handoff.ledger.events import GroupStats
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import ends_table, steps_table
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.observe.not_learning import SYMPTOMS, WINDOW
from service.observe.summary import summary_lines
from service.run.folder import SUMMARY
from service.run.records.progress import Progress
from service.run.records.writer import RunWriter
from service.types import MicroBatch, MiniBatch, PolicyVersion, Step, TrajectoryEnd, TrajectoryId
from tests.pure.learn.builders import CPU, VOCABULARY, small_model

SAMPLES, GROUPS = 4, 2


@dataclass(frozen=True)
class Play:
    """What the policy does in a step, and what comes of it; as it is, the run is healthy."""

    rewards: tuple[float, ...] = (0.0, 1.0, 0.0, 1.0)
    """By sample."""
    tokens: int = 8
    stop_reason: str = "stop"
    temperature: float = 1.0
    logprob_error: float = 0.0
    """What the engine reports too little of each token's log-probability."""
    staleness: int = 0


@dataclass(frozen=True)
class Cause:
    """A run that does not learn: what is set wrong, and how it plays."""

    play: Play = Play()
    first: Play | None = None
    """How it plays in its first `WINDOW` steps, where that differs."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


CAUSES = {
    "learning-rate": Cause(trainer={"lr": 1e-12}),
    "engine-and-trainer": Cause(Play(logprob_error=0.3)),
    "always-solved": Cause(Play(rewards=(1.0,) * SAMPLES)),
    "entropy": Cause(Play(temperature=0.02), first=Play()),
    "too-short": Cause(Play(tokens=1)),
    "cut": Cause(Play(rewards=(0.0,) * SAMPLES, stop_reason="length")),
    "never-solved": Cause(Play(rewards=(0.0,) * SAMPLES)),
    "no-variance": Cause(Play(rewards=(0.5,) * SAMPLES)),
    "stale": Cause(Play(logprob_error=0.6, staleness=1)),
    "clipped": Cause(Play(logprob_error=0.05), algorithm={"clip_low": 0.01, "clip_high": 0.01}),
    "no-gradient": Cause(Play(logprob_error=0.05), algorithm={"correction": {"token_band": [0.99, 1.01]}}),
    "shorter": Cause(Play(tokens=2), first=Play(tokens=12)),
}


def groups_of(step: int, play: Play, rng: np.random.Generator) -> Iterator[CompleteGroup]:
    version = np.full(play.tokens, PolicyVersion(0, step - play.staleness).pack())
    for number in range(GROUPS):
        uid, steps, ends = f"p{number}", [], []
        for sample, reward in enumerate(play.rewards):
            trajectory = TrajectoryId(step * GROUPS + number, sample)
            response = rng.integers(3, VOCABULARY, play.tokens).astype(np.int32)
            tokens = (np.array([5, 6], np.int32), response, np.full(play.tokens, -3, np.float32))
            mask = np.ones(play.tokens, np.bool_)
            steps.append(
                Step(trajectory, uid, 0, *tokens, mask, version, play.temperature, stop_reason=play.stop_reason)
            )
            ends.append(TrajectoryEnd(trajectory, uid, 1, play.stop_reason, reward))
        yield CompleteGroup(step * GROUPS + number, uid, steps_table(steps), ends_table(ends))


def as_sampled(learner: Learner, batch: MiniBatch, error: float) -> MiniBatch:
    """The mini-batch with the log-probabilities that an engine with the learner's weights reports, less an error."""

    def reported(micro: MicroBatch) -> MicroBatch:
        (logprob_M,) = learner.policy.logprobs([learner.policy.to_device(micro)])
        logprobs_N = micro.logprobs_N.copy()
        logprobs_N[micro.loss_mask_N] = logprob_M.numpy() - error
        return replace(micro, logprobs_N=logprobs_N)

    with torch.no_grad():
        return replace(batch, ranks=tuple(tuple(map(reported, rank)) for rank in batch.ranks))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return small_model(tmp_path_factory.mktemp("model"))


def played(cause: Cause, model: Path, folder: Path) -> tuple[Progress, list[str]]:
    """A run of real optimizer steps over real mini-batches."""
    plays = [cause.first] * WINDOW * (cause.first is not None) + [cause.play] * WINDOW
    config = Config(
        model=ModelConfig(dtype="float32"),
        algorithm=AlgorithmConfig(n_samples_per_prompt=SAMPLES, **cause.algorithm),
        trainer=TrainerConfig(
            **{"ranks": 1, "mini_batch_size": GROUPS, "max_tokens_per_micro_batch": 512, **cause.trainer}
        ),
    )
    learner = Learner(LearnSettings.of(config), model, CPU, 0, 1)
    said: list[str] = []
    run = RunWriter(folder)
    progress = Progress(len(plays), (), True, run, said.append, dict)
    progress.begin()
    history, rng = VersionHistory(), np.random.default_rng(0)
    for step, play in enumerate(plays, start=1):
        history.publish(PolicyVersion(0, step))
        formed = form_mini_batch(0, [*groups_of(step, play, rng)], history, batch_settings(config))
        batch = with_filtered(formed, GroupStats())
        report = learner.step(as_sampled(learner, batch_of_rank(batch, 0), play.logprob_error))
        assert report.applied, report.reason
        progress.stepped(PolicyVersion(0, step), batch.metrics, report.metrics, [])
    run.close()
    return progress, said


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named_first(name: str, model: Path, tmp_path: Path) -> None:
    progress, said = played(CAUSES[name], model, tmp_path)
    (named,) = (line for line in said if "may not learn" in line)
    assert f"(docs/not-learning.md#{name})" in named and f"(docs/not-learning.md#{name})" in progress.not_learning
    buffer = {"tokens": {}, "length_distance": 0.0, "token_length_distance": 0.0, "lengths": {}}
    progress.end("finished", buffer, [])
    summary = json.loads((tmp_path / SUMMARY).read_text())
    assert f"learning: at the end {progress.not_learning}" in summary_lines(summary)


def test_every_symptom_has_a_run_that_shows_it() -> None:
    assert CAUSES.keys() == {symptom.name for symptom in SYMPTOMS}


def test_a_healthy_run_is_not_blamed(model: Path, tmp_path: Path) -> None:
    progress, said = played(Cause(), model, tmp_path)
    assert progress.not_learning == "" and not any("may not learn" in line for line in said)
