"""The functions of the peers that do the same work as Baton's, on the same data."""

from __future__ import annotations

import logging
import sys
import typing
from typing import Any

import numpy as np
import typing_extensions

from benchmarks.handoff.workloads import Workload

if sys.version_info < (3, 12):
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc] # SkyRL hands typing's to pydantic

import torch
from loguru import logger
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.utils import merge_stepwise_output
from tensordict import TensorDict
from transfer_queue.utils import serial_utils

__all__ = ["TrajectoryID", "ppo_utils"]

logger.remove()
logging.disable(logging.WARNING)


class PadTokenizer:
    """The part of a tokenizer that the batch-tensor function uses."""

    pad_token_id = 0


def generator_output(workload: Workload) -> dict[str, Any]:
    """The workload's steps as lists in SkyRL's form."""
    steps = [step for episode in workload.episodes for step in episode]
    return {
        "prompt_token_ids": [step.prompt_ids.tolist() for step in steps],
        "response_ids": [step.response_ids.tolist() for step in steps],
        "rewards": [
            reward if k == len(episode) - 1 else 0.0
            for episode, reward in zip(workload.episodes, workload.rewards_G, strict=True)
            for k in range(len(episode))
        ],
        "loss_masks": [step.loss_mask.astype(int).tolist() for step in steps],
        "stop_reasons": [step.stop_reason for step in steps],
        "rollout_logprobs": [step.logprobs.tolist() for step in steps if step.logprobs is not None],
        "trajectory_ids": [TrajectoryID(step.prompt_uid, step.trajectory.sample) for step in steps],
        "is_last_step": [k == len(e) - 1 for e in workload.episodes for k in range(len(e))],
        "rollout_expert_indices": None,
        "rollout_metrics": None,
    }


def merge(output: dict[str, Any]) -> dict[str, Any]:
    """SkyRL's merge."""
    return merge_stepwise_output(output)


def batch_tensors(output: dict[str, Any]) -> Any:
    """SkyRL's batch tensors of the merged output, with each row's reward on its last token."""
    merged = merge(output)
    responses = merged["response_ids"]
    rewards = [[0.0] * (len(ids) - 1) + [reward] for ids, reward in zip(responses, merged["rewards"], strict=True)]
    columns = (responses, rewards, merged["loss_masks"], merged["rollout_logprobs"])
    return convert_prompts_responses_to_batch_tensors(PadTokenizer(), merged["prompt_token_ids"], *columns)


def tensordict(workload: Workload) -> Any:
    """The steps as TransferQueue carries ragged columns: nested tensors with a row for each step."""
    steps = [step for episode in workload.episodes for step in episode]
    columns = {
        "input_ids": [np.concatenate((step.prompt_ids, step.response_ids)) for step in steps],
        "response_mask": [step.loss_mask for step in steps],
        "rollout_log_probs": [step.logprobs for step in steps],
        "versions": [step.versions for step in steps],
    }
    nested = {
        name: torch.nested.as_nested_tensor([torch.from_numpy(part) for part in parts], layout=torch.jagged)
        for name, parts in columns.items()
    }
    return TensorDict(nested, batch_size=len(steps))


def transfer_queue(data: Any) -> Any:
    """The data after it was encoded as TransferQueue's frames, joined into one message, and read back."""
    items = serial_utils.encode(data)
    message = bytearray(serial_utils.calc_packed_size(items))
    serial_utils.pack_into(message, items)
    return serial_utils.decode(serial_utils.unpack_from(message))
