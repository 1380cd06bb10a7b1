"""Every key of `metrics.jsonl` has a meaning, which the documentation shows."""

from pathlib import Path

import numpy as np

from service.config import AlgorithmConfig, Config, ModelConfig, TrainerConfig
from service.config.core_settings import batch_settings
from service.evaluation.scores import EvalTrajectory, summarize
from service.handoff.batches.batch import batch_of_rank, form_mini_batch
from service.handoff.leases import with_filtered
from service.handoff.ledger.events import GroupStats
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import ends_table, steps_table
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.observe.metrics_table import TABLE
from service.observe.not_learning import SYMPTOMS
from service.run.folder import METRICS, read_lines
from service.run.records.progress import Progress
from service.run.records.writer import RunWriter
from service.types import PolicyVersion, Step, TrajectoryEnd, TrajectoryId
from tests.pure.learn.builders import CPU, small_model
from tests.step_keys import without_meaning

N = 2
"""Samples of a group, and turns of a trajectory."""


def group(group_id: int) -> CompleteGroup:
    """Turns that merge, of two versions."""
    steps, ends = [], []
    for sample in range(N):
        trajectory, uid, text = TrajectoryId(group_id, sample), f"p{group_id}", [5, 6]
        for index in range(N):
            response = [7 + sample, 8 + index]
            tokens = (np.array(text, np.int32), np.array(response, np.int32), np.full(2, -3, np.float32))
            version = np.full(2, PolicyVersion(0, index).pack())
            steps.append(Step(trajectory, uid, index, *tokens, np.ones(2, np.bool_), version, 1.0))
            text = [*text, *response, 9]
        ends.append(TrajectoryEnd(trajectory, uid, N, "stop", float(sample)))
    return CompleteGroup(group_id, uid, steps_table(steps), ends_table(ends))


def line(config: Config, folder: Path) -> dict[str, float]:
    """The line of a step with everything that a line can have."""
    history = VersionHistory()
    history.publish(PolicyVersion(0, 1))
    groups = [group(number) for number in range(2)]
    batch = with_filtered(form_mini_batch(0, groups, history, batch_settings(config)), GroupStats())
    report = Learner(LearnSettings.of(config), small_model(folder / "model"), CPU, 0, 1).step(batch_of_rank(batch, 0))
    assert report.applied
    played = [EvalTrajectory(f"p{prompt}", 1.0, 1, 4, "stop") for prompt in range(2) for _ in range(N)]
    environments = {"hangman": {"trajectories": 2.0, "won": 1.0}}
    generator = {"name": "g", "pid": 1, "elapsed_seconds": 9.0, "wait_seconds": 1.0, "environments": environments}
    run = RunWriter(folder / "run")
    states = {"waiting": 1.0, "step": 2.0}
    progress = Progress(config.run.max_steps, tuple(config.roles), True, run, lambda said: None, lambda: states)
    measured = report.metrics | summarize("held_out", played).metrics()
    progress.synced(0.5)
    progress.stepped(PolicyVersion(0, 2), batch.metrics, measured, [generator])
    run.close()
    (written,) = read_lines(folder / "run" / METRICS)
    return written


def test_every_key_of_a_line_has_a_meaning(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(dtype="float32"),
        algorithm=AlgorithmConfig(n_samples_per_prompt=N, kl_coef=0.1),
        trainer=TrainerConfig(ranks=1, mini_batch_size=2, max_tokens_per_micro_batch=64),
    )
    written = line(config, tmp_path)
    assert without_meaning(written) == []
    assert {"policy/reference_kl", "policy/by_staleness/1/kl", "environment/hangman/won"} <= written.keys()
    assert {symptom.key for symptom in SYMPTOMS} <= written.keys()
    of_evaluations = {"eval/lag_intervals"}
    assert {metric.key for metric in TABLE} - written.keys() == {"", *of_evaluations}
    assert without_meaning(["policy/new", "rewards", *written]) == ["policy/new", "rewards"]
