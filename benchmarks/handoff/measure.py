"""The measured functions, their input, and what the clock includes."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.handoff import peers
from benchmarks.handoff.workloads import SAMPLES, VOCAB_SIZE, Workload, engineering, long_tail, search, shared, turns
from service.columns import columns_of
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.prefixes.merge import merge
from service.handoff.prefixes.sharing import shared_form
from service.handoff.steps.tables import step_group, steps_table
from service.handoff.steps.values import Limits
from service.handoff.steps.wire import decode, encode
from service.handoff.validate import refusal
from service.types import Sender, StepGroup, Steps

LIMITS = Limits(
    vocab_size=VOCAB_SIZE, max_input_length=40_000, max_generate_length=4096, max_turns=64,
    n_samples_per_prompt=SAMPLES, max_attempts=3, max_group_bytes=1 << 30,
)  # fmt: skip
SETTINGS = BatchSettings(ranks=8, token_budget=131_072, max_staleness=8)

PEER_MERGE = "SkyRL merge"
PEER_ROAD = "SkyRL merge, batch tensors"
PEER_CODEC = "TransferQueue codec"
ROAD = "decode, validate, merge, score, mini-batch, pack"


class Task(NamedTuple):
    """A function to measure, and the reference for its tokens per second."""

    function: str
    input_form: str
    clock: str
    run: Callable[[], Any]
    against: str = ""


class Figure(NamedTuple):
    """One measured function on one workload."""

    workload: Workload
    task: Task
    seconds: float
    """Median CPU time of the runs, which other processes of the machine disturb least."""
    ratio: float | None
    """Tokens per second over those of the task's reference."""
    peak_mib: float
    """Peak memory of the function by tracemalloc, in a separate run."""


def figures(repeats: int) -> list[Figure]:
    """Every figure of every workload, in one run."""
    found: list[Figure] = []
    for workload in (search(), engineering(), long_tail()):
        found += measured(workload, tasks(workload), repeats)
    return found + turn_scaling(repeats)


def tasks(workload: Workload) -> list[Task]:
    """All functions on one workload; conversions between input forms are separate tasks."""
    sender = Sender("generator-0", 1, 0)
    full_steps = [step for episode in workload.episodes for step in episode]
    shared_steps = [step for episode in workload.episodes for step in shared(episode)]
    small = steps_table(shared_steps)
    full_group = step_group(sender, full_steps, workload.ends())
    small_group = step_group(sender, shared_steps, workload.ends())
    lists, nested = peers.generator_output(workload), peers.tensordict(workload)
    messages = [encode(group) for group in _groups(workload)]
    full_form, small_form, list_form = "arrays with full prompts", "prefix-shared step groups", "Python lists"
    return [
        Task(PEER_MERGE, list_form, "merge_stepwise_output", lambda: peers.merge(lists)),
        Task(PEER_ROAD, list_form, "merge, left-padded tensors", lambda: peers.batch_tensors(lists)),
        Task(PEER_CODEC, "nested tensors, full prompts", "encode, join, decode", lambda: peers.transfer_queue(nested)),
        Task("memory copy", small_form, "one copy of each token column", lambda: _copied(small)),
        Task("merge", small_form, "merge", lambda: merge(small), PEER_MERGE),
        Task("bytes to mini-batch", "messages, one a group", ROAD, lambda: _road(messages), PEER_ROAD),
        Task("codec", small_form, "encode, decode, validate, checksums", lambda: _coded(small_group), PEER_CODEC),
        Task("codec", full_form, "encode, decode, validate, checksums", lambda: _coded(full_group), PEER_CODEC),
        Task("references", "Step objects with full prompts", "shared_form", lambda: shared_form(full_steps)),
    ]


def measured(workload: Workload, work: list[Task], repeats: int) -> list[Figure]:
    """The figures of one workload."""
    medians = _medians(work, repeats)
    reference = {task.function: median for task, median in zip(work, medians, strict=True)}
    ratios = [
        reference[task.against] / median if task.against else None for task, median in zip(work, medians, strict=True)
    ]
    peaks = [_peak(task.run) for task in work]
    return [Figure(workload, *found) for found in zip(work, medians, ratios, peaks, strict=True)]


def turn_scaling(repeats: int) -> list[Figure]:
    """Compare the speed of merging in new tokens per second: episodes of 50 turns against episodes of 5 turns, with
    turns of the same size and with as many new tokens in total."""
    workloads = (turns(5, groups=40), turns(50, groups=4))
    tables = [steps_table([step for episode in w.episodes for step in shared(episode)]) for w in workloads]
    form = "prefix-shared step groups"
    work = [Task("merge", form, "merge", partial(merge, steps), "tokens/s of 5 turns") for steps in tables]
    medians = _medians(work, 5 * repeats)
    rates = [w.new_tokens / median for w, median in zip(workloads, medians, strict=True)]
    ratios = [rate / rates[0] for rate in rates]
    peaks = [_peak(task.run) for task in work]
    return [Figure(*found) for found in zip(workloads, work, medians, ratios, peaks, strict=True)]


def _medians(work: list[Task], repeats: int) -> list[float]:
    """Median CPU seconds of each task; runs of all tasks interleave, so that drift of the machine affects all
    equally."""
    seconds: list[list[float]] = [[] for _ in work]
    for _ in range(repeats):
        for task, times in zip(work, seconds, strict=True):
            gc.collect()
            start = time.process_time()
            task.run()
            times.append(time.process_time() - start)
    return [float(np.median(times)) for times in seconds]


def table(found: list[Figure]) -> str:
    """The figures as an aligned table."""
    lines, before = [], None
    for workload, task, seconds, ratio, peak_mib in found:
        if workload is not before:
            lines.append(f"\n{workload.name}: {workload.new_tokens:,} new tokens")
        before = workload
        faster = f"{ratio:8.1f}x {task.against}" if ratio else ""
        lines.append(
            f"  {task.function:27} {task.input_form:29} {task.clock:49} {1e3 * seconds:9.2f} ms "
            f"{workload.new_tokens / seconds / 1e6:9.1f} M tokens/s {peak_mib:8.1f} MiB {faster}"
        )
    return "\n".join(lines)


def _groups(workload: Workload) -> list[StepGroup]:
    """One message per group, in the prefix-shared form."""
    ends = workload.ends()
    return [
        step_group(
            Sender("generator-0", 1, start),
            [step for episode in workload.episodes[start : start + SAMPLES] for step in shared(episode)],
            ends[start : start + SAMPLES],
        )
        for start in range(0, len(workload.episodes), SAMPLES)
    ]


def _road(messages: list[bytes]) -> Any:
    groups = []
    for message in messages:
        group = decode(message, LIMITS)
        if not isinstance(group, StepGroup) or (found := refusal(group, LIMITS)) is not None:
            raise ValueError(f"a message of the benchmark was refused: {group if group else found}")
        groups.append(CompleteGroup(int(group.ends.group_id_E[0]), group.ends.uids[0], group.steps, group.ends))
    return form_mini_batch(1, groups, VersionHistory(), SETTINGS)


def _coded(group: StepGroup) -> Any:
    again = decode(encode(group), LIMITS)
    if not isinstance(again, StepGroup) or refusal(again, LIMITS) is not None:
        raise ValueError("a message of the benchmark was refused")
    return again


def _copied(steps: Steps) -> list[Any]:
    return [array.copy() for column in columns_of(Steps).tokens if (array := getattr(steps, column.name)) is not None]


def _peak(run: Callable[[], Any]) -> float:
    tracemalloc.start()
    try:
        kept = run()
        return tracemalloc.get_traced_memory()[1] / 2**20 if kept is not None else 0.0
    finally:
        tracemalloc.stop()
