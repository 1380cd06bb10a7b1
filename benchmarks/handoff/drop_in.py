"""`merge_generator_output` against SkyRL's own merge, on the same lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.handoff import peers
from benchmarks.handoff.measure import PEER_MERGE, Figure, Task, measured
from benchmarks.handoff.workloads import Workload, long_tail, turns
from service.interop.skyrl import merge_generator_output


def drop_in_figures(repeats: int) -> list[Figure]:
    """Of each workload the figures for both ways in which an agent loop makes prompts."""
    found: list[Figure] = []
    for workload in (turns(4, groups=32), turns(10, groups=16), turns(50, groups=4), long_tail(groups=8)):
        lists = peers.generator_output(workload)
        found += _figures(workload, "every prompt tokenised anew", lists, repeats)
        found += _figures(workload, "token in, token out", _with_shared_tokens(lists), repeats)
    return found


def _figures(workload: Workload, lists_are: str, lists: dict[str, Any], repeats: int) -> list[Figure]:
    prompts = lists["prompt_token_ids"]
    form = "Python lists"
    tasks = [
        Task(PEER_MERGE, form, "merge_stepwise_output", lambda: peers.merge(lists)),
        Task("drop-in merge", form, "merge_generator_output", lambda: merge_generator_output(lists), PEER_MERGE),
        Task("reading alone", form, "sum of each prompt", lambda: [sum(prompt) for prompt in prompts], PEER_MERGE),
    ]
    return measured(replace(workload, name=f"{workload.name}, {lists_are}"), tasks, repeats)


def _with_shared_tokens(lists: dict[str, Any]) -> dict[str, Any]:
    """The same lists, where a prompt holds the integer objects of the step before, as `prompt + response` does."""
    prompts: list[list[int]] = []
    before: list[int] = []
    for prompt, response, last in zip(
        lists["prompt_token_ids"], lists["response_ids"], lists["is_last_step"], strict=True
    ):
        prompts.append(before + prompt[len(before) :])
        before = [] if last else prompts[-1] + response
    return lists | {"prompt_token_ids": prompts}
