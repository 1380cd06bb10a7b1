"""Merge a step-wise `GeneratorOutput` into one with fewer and longer entries, as SkyRL's `merge_stepwise_output` does.

    prompt_token_ids  [[1, 2], [1, 2, 3, 4]]       [[1, 2]]
    response_ids      [[3], [5, 6]]           ->   [[3, 4, 5, 6]]
    loss_masks        [[1], [1, 1]]                [[1, 0, 1, 1]]

Lists stay lists: they are compared and sliced, and no token is converted. A prompt is compared with the row so far in
place. SkyRL copies both for every turn, so its cost grows faster with the number of turns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from service.interop.skyrl.checks import check_mergeable, mask_bytes

Tokens = TypeVar("Tokens", list[Any], bytearray)


def merge_generator_output(output: Mapping[str, Any]) -> dict[str, Any]:
    """The merged output, equal to that of `merge_stepwise_output` (skyrl 0.3.0) in every field; the input is unchanged.

    Consecutive entries of a trajectory become one where prompt and response of the one begin the prompt of the next.
    The tokens between two responses have loss mask, log-probability and reward 0. A reward that is one number, the
    stop reason, the identity and the last-step flag are those of the last entry.

    As SkyRL does, it computes `rollout_metrics` anew, sets `trajectory_generation_times` to None and leaves out what it
    has no merged form of (`env_metrics`, fields of one's own).

    Raises:
        ValueError: a field that is missing, cannot be merged or has a wrong form; trajectories that are interleaved,
            go on after their last step or have none.

    >>> merged = merge_generator_output({
    ...     "prompt_token_ids": [[1, 2], [1, 2, 3, 4], [1, 2]],
    ...     "response_ids": [[3], [5, 6], [7]],
    ...     "rewards": [0.0, 1.0, 0.5],
    ...     "loss_masks": [[1], [1, 1], [1]],
    ...     "trajectory_ids": [("a", 0), ("a", 0), ("a", 1)],
    ...     "is_last_step": [False, True, True],
    ... })
    >>> merged["response_ids"], merged["loss_masks"], merged["rewards"]
    ([[3, 4, 5, 6], [7]], [[1, 0, 1, 1], [1]], [1.0, 0.5])
    """
    check_mergeable(output)
    masks = [mask_bytes(mask, k) for k, mask in enumerate(output["loss_masks"])]
    zeros: dict[str, list[Any]] = {"loss_masks": [0]}
    if output.get("rollout_logprobs") is not None:
        zeros["rollout_logprobs"] = [0.0]
    if isinstance(output["rewards"][0], list):
        zeros["rewards"] = [0.0]
    of_last = [name for name in _PER_ROW if name not in zeros and output.get(name) is not None]
    merged: dict[str, Any] = {name: [] for name in ("prompt_token_ids", "response_ids", *zeros, *of_last)}
    row_masks = []
    for row in _rows(output["prompt_token_ids"], output["response_ids"], output["is_last_step"]):
        merged["prompt_token_ids"].append(output["prompt_token_ids"][row.first].copy())
        merged["response_ids"].append(row.response)
        for name, zero in zeros.items():
            merged[name].append(_spread(output[name], row, zero * len(row.response)))
        for name in of_last:
            merged[name].append(output[name][row.last])
        row_masks.append(_spread(masks, row, bytearray(len(row.response))))
    return {name: merged.get(name) for name in _IN_ORDER} | {"rollout_metrics": _metrics(merged["rewards"], row_masks)}


_PER_ROW = ("rewards", "stop_reasons", "trajectory_ids", "is_last_step")
_IN_ORDER = (
    "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs",
    "trajectory_generation_times", "trajectory_ids", "is_last_step",
)  # fmt: skip


class _Row(NamedTuple):
    """Consecutive entries that become one."""

    first: int
    last: int
    starts: list[int]
    """Where the response of each entry starts in the response of the row."""
    response: list[int]


class _End:
    """A token behind the last one: `[1, 2, END] < [1, 2, 3]` is END, `[1, 2, END] < [1, 7, 3]` is True.

    Python orders two lists by the first elements that differ, and gives back what the comparison of these two says.
    """

    def __lt__(self, other: object) -> _End:
        return self


END: Any = _End()


def _starts_with(prompt: list[int], sequence: list[int]) -> bool:
    """Whether the prompt begins with the sequence; compared in place, as `prompt[:len(sequence)]` is a copy."""
    if len(prompt) <= len(sequence):
        return prompt == sequence
    sequence.append(END)
    begins = (sequence < prompt) is END
    sequence.pop()
    return begins


def _rows(prompts: Sequence[list[int]], responses: Sequence[list[int]], is_last_step: Sequence[bool]) -> Iterator[_Row]:
    """The rows in their order; the sequence of a row grows by what each entry adds."""
    k = 0
    while k < len(prompts):
        first, prompt_length = k, len(prompts[k])
        sequence, starts = prompts[k] + responses[k], [0]
        while not is_last_step[k]:
            try:
                if not _starts_with(prompts[k + 1], sequence):
                    break
            except TypeError:
                raise ValueError(f"prompt_token_ids[{k + 1}] or an entry before it holds what is no token id") from None
            k += 1
            sequence += prompts[k][len(sequence) :]
            starts.append(len(sequence) - prompt_length)
            sequence += responses[k]
        yield _Row(first, k, starts, sequence[prompt_length:])
        k += 1


def _spread(values: Sequence[Any], row: _Row, zeros: Tokens) -> Tokens:
    """The values of the row's entries at their places among zeros: [[1], [1, 1]] at 0 and 2 -> [1, 0, 1, 1]."""
    for k, start in enumerate(row.starts, row.first):
        zeros[start : start + len(values[k])] = values[k]
    return zeros


_SAMPLED = re.compile(rb"\x01\x01*")
"""A run of ones. Five times as fast as the pattern of one part, because the search leaps to the first byte."""


def _metrics(rewards: Sequence[Any], masks: Sequence[bytearray]) -> dict[str, float]:
    """The `rollout_metrics` that SkyRL computes over rows, under SkyRL's names.

    Args:
        rewards: [R] numbers, or lists of one number a token.
        masks: [R] loss mask of each response, a byte a token.
    """
    tokens_R = np.array([len(mask) for mask in masks])
    reward_R = np.array([float(np.sum(reward) if isinstance(reward, list) else reward) for reward in rewards])
    turns = np.array([len(run) for mask in masks for run in _SAMPLED.findall(mask)])
    metrics: dict[str, float] = {}
    for name, values_R in (("num", tokens_R), ("assistant", np.array([mask.count(1) for mask in masks]))):
        for statistic, value in (("min", values_R.min()), ("max", values_R.max()), ("avg", values_R.mean())):
            metrics[f"generate/{statistic}_{name}_tokens"] = value.item()
        metrics[f"generate/std_{name}_tokens"] = values_R.std().item()
    for name, chosen_R in (("non_zero", tokens_R[reward_R > 0]), ("zero", tokens_R[reward_R == 0])):
        metrics[f"generate/avg_tokens_{name}_rewards"] = chosen_R.mean().item() if chosen_R.size else 0.0
    for name in ("mean", "std", "max") if turns.size else ():
        metrics[f"generate/tokens_per_turn_{name}"] = getattr(turns, name)().item()
    return metrics
