"""SmolLM2-135M-Instruct, which `make real` prepares: log-probabilities of the tokens of games that the engine sampled,
by engine, trainer and transformers (row by row).

    python -m benchmarks.real_model [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.engine.run_player import RunPlayer
from baton.examples.guess_number import rows
from benchmarks.gpu.small_engine import by_row, serving
from service.config import Config, load
from service.config.core_settings import batch_settings
from service.handoff.batches.batch import form_mini_batch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import ends_table
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.rollout.environment import Task
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.rows import write_rows
from service.rollout.step_sinks import StepColumns
from service.types import MiniBatch, PolicyVersion, TrajectoryId

MODEL, RECIPE = Path("models/SmolLM2-135M-Instruct"), Path("configs/smollm2_guess.yaml")
SETTINGS = ("trainer.ranks=1", "trainer.mini_batch_size=3", "algorithm.n_samples_per_prompt=8")


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # on busy cores several threads would wait for each other
    print(json.dumps(agreement(arguments.dtype)))


def agreement(dtype: str) -> dict[str, float]:
    """Absolute differences, in nats, between the log-probabilities of the same sampled tokens."""
    config = load([RECIPE], [*SETTINGS, f"model.path={MODEL}", f"model.dtype={dtype}"]).config
    (micros,) = asyncio.run(_played(config)).ranks
    policy = Policy(LearnSettings.of(config), MODEL, torch.device("cpu"), 0, 1)
    of_engine = np.concatenate([micro.logprobs_N[micro.loss_mask_N] for micro in micros])
    of_trainer = torch.cat(policy.logprobs([policy.to_device(micro) for micro in micros])).numpy()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=getattr(torch, dtype))
    of_rows = np.concatenate([by_row(model, micro) for micro in micros])
    compared = {"engine_trainer": of_engine - of_trainer, "trainer_transformers": of_trainer - of_rows}
    return {"tokens": float(len(of_engine))} | {
        f"{name}_{kind}": float(take(np.abs(differences)))
        for name, differences in compared.items()
        for kind, take in (("mean", np.mean), ("largest", np.max))
    }


async def _played(config: Config) -> MiniBatch:
    """A mini-batch of games that vLLM played."""
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "rows.jsonl", rows(config.trainer.mini_batch_size, 0))
        tasks = load_tasks(Path(name) / "rows.jsonl")
    async with serving(config, MODEL) as engine:
        player = RunPlayer(config, MODEL, engine)
        groups = await asyncio.gather(*(played_group(player, o, task, config) for o, task in enumerate(tasks)))
        await player.close()
    history = VersionHistory()
    history.publish(PolicyVersion(1, 0))
    return form_mini_batch(0, groups, history, batch_settings(config))


async def played_group(player: RunPlayer, group_id: int, task: Task, config: Config) -> CompleteGroup:
    """The trajectories of a task."""
    columns, samples = StepColumns(), range(config.algorithm.n_samples_per_prompt)
    await asyncio.gather(*(player.play(TrajectoryId(group_id, sample), task, columns) for sample in samples))
    return CompleteGroup(group_id, task.uid, columns.steps(), ends_table(columns.ends))


if __name__ == "__main__":
    main()
