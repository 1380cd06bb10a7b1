"""What happens in a run becomes the right numbers."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from actors.observe.reporting import Reporter
from service.config import Config
from service.handoff.steps.tables import steps_table
from service.handoff.verbs import ScorerStatus
from service.observe.measure import (
    LeasedBatches,
    measure_buffer,
    measure_ended,
    measure_step,
    measure_steps,
)
from service.observe.metrics import AlertThresholds, Metrics
from service.scorers.reply import REASONS
from service.types import Extension, MiniBatch, Step, TrajectoryEnd, TrajectoryId
from tests.pure.handoff import worlds
from tests.pure.learn.builders import MadeRow, mini_batch
from tests.pure.metrics.test_metrics import value as value_of


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("r", "i", AlertThresholds.of(Config()))


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return value_of(metrics.snapshot(), name, role="r", ident="i", **labels)


def test_a_line_of_metrics_becomes_gauges_histograms_and_counters(metrics: Metrics) -> None:
    line = {
        "trainer/global_step": 7,
        "reward/avg_raw_reward": 0.5,
        "generate/batch_padded_seq_len": 100,
        "generate/batch_num_seq": 10,
        "generate/batch_num_tokens": 600,
        "generate/num_seq_before_merge": 25,
        "generate/num_seq_after_merge": 10,
        "async/staleness_mean": 1.5,
        "timing/step": 0.25,
    }
    measure_step(metrics, line, wall=1e9)
    measure_step(metrics, {**line, "trainer/global_step": 8}, wall=1e9 + 1)
    assert value(metrics, "baton_policy_version") == 8
    assert value(metrics, "baton_reward") == 0.5
    assert value(metrics, "baton_batch_padded_sequence_length_last_tokens") == 100
    assert value(metrics, "baton_batch_padded_sequence_length_tokens_count") == 2
    assert value(metrics, "baton_batch_tokens_total") == 2000
    assert value(metrics, "baton_batch_padding_tokens_total") == 800
    assert value(metrics, "baton_rows_before_merge_total") == 50
    assert value(metrics, "baton_rows_after_merge_total") == 20
    assert value(metrics, "baton_optimizer_steps_total") == 2
    assert value(metrics, "baton_step_seconds_sum") == 0.5
    assert value(metrics, "baton_last_optimizer_step_timestamp_seconds") == 1e9 + 1
    # The mean of a batch is no observation of a token's staleness.
    assert b"baton_staleness_versions" not in metrics.snapshot()


def step(prompt: int, response: int, extends: Extension | None = None) -> Step:
    made = worlds.step(0, [0] * prompt, [0] * response, uid="p")
    return replace(made, loss_mask=np.arange(response) < response - 1, extends=extends)


def test_a_turn_counts_its_whole_prompt_and_only_sampled_tokens(metrics: Metrics) -> None:
    measure_steps(metrics, [steps_table([step(30, 5)]), steps_table([step(7, 5, Extension(0, 35, 0))])])
    measure_ended(metrics, [(TrajectoryEnd(TrajectoryId(0, 0), "p", 2, "stop", 1.0), "env")])
    assert value(metrics, "baton_step_prompt_length_tokens_sum") == 30 + 42
    assert value(metrics, "baton_step_response_length_tokens_sum") == 10
    assert value(metrics, "baton_generated_tokens_total") == 8
    assert value(metrics, "baton_trajectory_turns_sum") == 2
    assert value(metrics, "baton_completed_trajectories_total", stop_reason="stop") == 1


def test_cut_responses_are_counted_by_turn(metrics: Metrics) -> None:
    steps = [
        replace(step(3, 5), index=index, stop_reason=reason) for index, reason in enumerate(["length", "stop"] * 4)
    ]
    measure_steps(metrics, [steps_table(steps), steps_table([replace(step(3, 5), index=99, stop_reason="length")])])
    for turns, n_responses, n_truncated in (("1", 1, 1), ("2", 1, 0), ("4", 1, 0), ("5_8", 4, 2), ("33_up", 1, 1)):
        assert value(metrics, "baton_responses_total", turns=turns) == n_responses
        assert value(metrics, "baton_truncated_responses_total", turns=turns) == n_truncated


def row(trajectory: int, length: int, staleness: int) -> MadeRow:
    zeros = np.zeros(length)
    tokens, logprobs = zeros.astype(np.int32), zeros.astype(np.float32)
    return MadeRow(trajectory, tokens, np.arange(length) % 2 == 0, logprobs, np.full(length, staleness, np.int32))


def leased(lease: int) -> MiniBatch:
    """Of two ranks; the last row is a dummy."""
    return replace(mini_batch([[[row(0, 10, 0), row(1, 20, 0)]], [[row(2, 30, 3), row(-1, 2, 3)]]], 3), lease=lease)


def test_a_batch_is_measured_once_when_its_step_is_committed_and_dummy_rows_are_not(metrics: Metrics) -> None:
    batches = LeasedBatches(metrics)
    batches.leased(leased(1))
    batches.released(1)
    batches.committed(1)
    assert b"baton_row_length_tokens" not in metrics.snapshot()
    batches.leased(leased(2))
    batches.leased(leased(2))
    batches.committed(2)
    batches.committed(2)
    assert value(metrics, "baton_row_length_tokens_count") == 3
    assert value(metrics, "baton_row_length_tokens_sum") == 60
    assert value(metrics, "baton_staleness_versions_bucket", le="0.0") == 15
    assert value(metrics, "baton_staleness_versions_count") == 31


@dataclass
class FakeBufferStatus:
    groups: dict[str, int] = field(default_factory=lambda: {"open": 3, "leased": 1})
    tokens: dict[str, int] = field(default_factory=lambda: {"open": 90, "trained": 10})
    refused: dict[str, int] = field(default_factory=lambda: {"schema": 2})
    restarts: dict[str, int] = field(default_factory=lambda: {"silent": 1})
    given_up: dict[str, int] = field(default_factory=lambda: {"environment_error": 3})
    accepted_tokens: int = 100
    reserved_bytes: int = 4096
    length_distance: float = 0.25
    token_length_distance: float = 0.5
    journal_start: int = 1024
    journal_position: int = 3072
    journal_limit_bytes: int = 4096
    prompts: dict[str, int] = field(default_factory=lambda: {"inside": 3})
    passed_over: int = 7
    scorers: dict[str, ScorerStatus] = field(default_factory=dict)


def test_the_buffers_ledger_is_shown_at_one_revision(metrics: Metrics) -> None:
    status: Any = FakeBufferStatus()
    measure_buffer(metrics, status, 1 << 20)
    status.groups = {"open": 1}
    measure_buffer(metrics, status, 1 << 20)
    assert value(metrics, "baton_buffer_groups", state="open") == 1
    assert b'state="leased"' not in metrics.snapshot()
    assert value(metrics, "baton_tokens", fate="open") + value(metrics, "baton_tokens", fate="trained") == value(
        metrics, "baton_accepted_tokens_total"
    )
    assert value(metrics, "baton_refused_messages_total", reason="schema") == 2
    assert value(metrics, "baton_given_up_trajectories_total", reason="environment_error") == 3
    assert value(metrics, "baton_length_distance", of="trajectories") == 0.25
    assert value(metrics, "baton_length_distance", of="tokens") == 0.5
    assert value(metrics, "baton_journal_bytes") == 2048, "what was given up takes no room"
    assert value(metrics, "baton_journal_limit_bytes") == 4096


def test_a_scorer_that_has_not_failed_yet_has_a_zero_for_each_reason_for_which_it_may(metrics: Metrics) -> None:
    status: Any = FakeBufferStatus(scorers={"judge": ScorerStatus()})
    measure_buffer(metrics, status, 1, REASONS)
    for reason in REASONS:
        assert value(metrics, "baton_scorer_failures_total", scorer="judge", reason=reason) == 0
    status.scorers["judge"].failures["died"] += 2
    measure_buffer(metrics, status, 1, REASONS)
    assert value(metrics, "baton_scorer_failures_total", scorer="judge", reason="died") == 2


class FakeHub:
    """Stands in for the hub's actor handle."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, bytes]] = []
        self.reports: list[list[tuple[str, dict[str, Any]]]] = []
        self.push = self

    def remote(self, source: str, snapshot: bytes, reports: list[tuple[str, dict[str, Any]]], timeline: bytes) -> None:
        self.pushed.append((source, snapshot))
        self.reports.append(reports)


async def test_a_reporter_pushes_at_once_and_a_last_time_when_it_stops() -> None:
    hub = FakeHub()
    reporter = Reporter("buffer", "b", Config(), hub, lambda metrics: metrics.count("baton_optimizer_steps_total"))
    reporter.start()
    await asyncio.sleep(0)
    reporter.stop()
    await asyncio.sleep(0)
    assert [source for source, _ in hub.pushed] == ["buffer/b", "buffer/b"]
    assert b'baton_optimizer_steps_total{ident="b",role="buffer"} 2.0' in hub.pushed[-1][1]


def test_reports_go_with_the_next_push_once_and_as_they_were() -> None:
    hub = FakeHub()
    reporter = Reporter("driver", "driver", Config(), hub)
    line = {"trainer/global_step": 1}
    reporter.report("step", line)
    line["trainer/global_step"] = 2
    reporter.report("step", line)
    reporter.push()
    reporter.push()
    assert hub.reports == [[("step", {"trainer/global_step": 1}), ("step", {"trainer/global_step": 2})], []]


async def test_a_push_that_fails_says_so_at_once(caplog: pytest.LogCaptureFixture) -> None:
    def fails(metrics: Metrics) -> None:
        raise ZeroDivisionError("a bug in what is measured")

    reporter = Reporter("generator", "generator-7", Config(), FakeHub(), refresh=fails)
    reporter.start()
    (pushing,) = asyncio.all_tasks() - {asyncio.current_task()}
    with pytest.raises(ZeroDivisionError):
        await pushing
    assert "generator/generator-7 pushes no more metrics to the hub" in caplog.text
    assert "a bug in what is measured" in caplog.text
