"""The length of a padded mini-batch for three ways to make training rows of the same trajectories, in one run.

    python -m benchmarks.padded_lengths

Runs the small search recipe once and records it; then every mini-batch that it trained is formed again from the
journal, by the buffer's own code, with

    observations inside responses    a row per turn: prompt | response + observation of the search (loss mask 0)
    generated tokens only            a row per turn: prompt | response; observations are in the next turn's prompt
    generated tokens only, merged    turns that continue one another share a row

Seed and trajectories are the same, so only the rows differ. A loop that keeps observations inside responses checks the
length only before the next turn. So the last turn's observation counts too if the trajectory was cut off after it (the
environment computes it again).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.own_environment import ROOT
from benchmarks.peer.baton_side import trained
from service.config import Config, load
from service.config.core_settings import batch_settings, message_limits
from service.handoff.batches.batch import BatchSettings, form_mini_batch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.prefixes.merge import merge
from service.handoff.steps.tables import end_objects, row_objects, step_objects, steps_table
from service.handoff.steps.values import StopReason
from service.rollout.chat.chat import Chat, load_chat
from service.rollout.environment import Task
from service.rollout.factory import Environments
from service.rollout.prompts.dataset import load_tasks
from service.types import NO_VERSION, Int32s, Step
from tests.recorded import Recorded, recorded

RECIPE = ROOT / "configs" / "search_r1_tiny.yaml"
PLOT = ROOT / "docs" / "padded_lengths.png"
VARIANTS = ("observations inside responses", "generated tokens only", "generated tokens only, merged")
CUT_OFF = (StopReason.LENGTH, StopReason.MAX_TURNS)


class Measured(NamedTuple):
    """The measures of one mini-batch in one variant."""

    padded_length: int
    """Tokens of its longest row, to which every row would be padded."""
    rows: int


class World(NamedTuple):
    """Configuration, chat template and tasks of a recorded run."""

    config: Config
    chat: Chat
    tasks: dict[str, Task]

    async def observation(self, step: Step) -> Int32s:
        """The observation that the environment would have given after a trajectory's last turn."""
        episode = Environments(self.config.env).make(self.tasks[step.prompt_uid])
        await episode.reset(self.tasks[step.prompt_uid], 0)
        result = await episode.step(self.chat.text(step.response_ids))
        await episode.close()
        return self.chat.delta(result.messages, int(step.response_ids[-1]))


def main() -> None:
    """Run, measure, print the table, draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of the run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, settings = (
            Path(folder) / "run",
            [f"run.max_steps={arguments.steps}", "data.eval_every=0", "metrics.port=0"],
        )
        trained(["--config", str(RECIPE), *settings], Path(folder))
        config = load([run / "config.yaml"]).config
        measured = measure(config, run)
    longest = config.generator.max_input_length + config.generator.max_generate_length
    beyond = max(batch.padded_length for batch in measured[VARIANTS[1]])
    if beyond > longest:
        raise SystemExit(f"a row of generated tokens only has {beyond} tokens, more than {longest}")
    print(table(measured, longest))
    draw(measured, longest)


def measure(config: Config, run: Path) -> dict[str, list[Measured]]:
    """Measure every mini-batch of a recorded run in each variant."""
    tasks = {task.uid: task for task in load_tasks(run / "data" / "train.jsonl")}
    world = World(config, load_chat(run / "model", config.generator), tasks)
    settings = batch_settings(config)
    measured: dict[str, list[Measured]] = {name: [] for name in VARIANTS}
    for step in range(1, len((run / "metrics.jsonl").read_text().splitlines()) + 1):
        found = recorded(message_limits(config), run / "journal", step)
        told = found._replace(groups=[asyncio.run(with_observations(world, group)) for group in found.groups])
        for name, of, mode in zip(VARIANTS, (told, found, found), ("off", "off", "linear"), strict=True):
            measured[name].append(_measured(of, replace(settings, mode=mode, token_budget=1 << 30)))
    return measured


def _measured(of: Recorded, settings: BatchSettings) -> Measured:
    metrics = form_mini_batch(of.lease, of.groups, of.history, settings).metrics
    return Measured(int(metrics["generate/batch_padded_seq_len"]), int(metrics["generate/batch_num_seq"]))


async def with_observations(world: World, group: CompleteGroup) -> CompleteGroup:
    """The group with each turn's observation after its response.

    prompt | response        prompt response observation | response        becomes
    prompt | response observation        prompt response observation | response [observation, where it was cut off]
    """
    cut_off = {end.trajectory for end in end_objects(group.ends) if end.stop_reason in CUT_OFF}
    whole = row_objects(merge(group.steps, "off").rows)  # one row per step
    steps = sorted(step_objects(group.steps), key=lambda step: (step.trajectory, step.index))
    prompts = {(row.trajectory, row.first_step): row.prompt_ids for row in whole}
    steps = [replace(s, prompt_ids=prompts[s.trajectory, s.index], extends=None) for s in steps]
    told = []
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if following is not None and following.trajectory == step.trajectory:
            told.append(_telling(step, following.prompt_ids[len(step.prompt_ids) + len(step.response_ids) :]))
        elif step.trajectory in cut_off:
            told.append(_telling(step, await world.observation(step)))
        else:
            told.append(step)
    return group._replace(steps=steps_table(told))


def _telling(step: Step, observation: Int32s) -> Step:
    n = len(observation)
    return replace(
        step,
        response_ids=np.concatenate([step.response_ids, observation]),
        loss_mask=np.concatenate([step.loss_mask, np.zeros(n, dtype=np.bool_)]),
        logprobs=None if step.logprobs is None else np.concatenate([step.logprobs, np.zeros(n, dtype=np.float32)]),
        versions=np.concatenate([step.versions, np.full(n, NO_VERSION, dtype=np.int64)]),
    )


def table(measured: dict[str, list[Measured]], longest: int) -> str:
    """The variants as a Markdown table."""
    lines = ["| rows hold | padded length: mean | longest | beyond the limit | rows | padded slots of a mini-batch |"]
    lines.append("|---|---|---|---|---|---|")
    for name, batches in measured.items():
        lengths, rows = (np.array(column) for column in list(zip(*batches, strict=True))[:2])
        beyond = f"{(lengths > longest).sum()} of {len(batches)}"
        slots = (lengths * rows).mean()
        lines.append(
            f"| {name} | {lengths.mean():.0f} | {lengths.max()} | {beyond} | {rows.mean():.0f} | {slots:.0f} |"
        )
    return "\n".join(lines)


def draw(measured: dict[str, list[Measured]], longest: int) -> None:
    """Plot padded length and padded slots over the optimizer steps."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, batches in measured.items():
        steps = range(1, len(batches) + 1)
        left.plot(steps, [batch.padded_length for batch in batches], label=name)
        right.plot(steps, [batch.padded_length * batch.rows for batch in batches], label=name)
    left.axhline(longest, color="grey", linestyle="--", linewidth=1, label="max_input_length + max_generate_length")
    left.set(xlabel="optimizer step", ylabel="padded length (tokens)", ylim=(0, None))
    right.set(xlabel="optimizer step", ylabel="rows x padded length (tokens)", ylim=(0, None))
    left.legend(fontsize=7, loc="lower left")
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    main()
