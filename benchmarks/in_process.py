"""Training in one process: rollouts, mini-batches and optimizer steps take turns.

There is neither Ray nor vLLM, and every token is fresh, so a benchmark of learning gives the same result each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import xxhash
from transformers import AutoModelForCausalLM

from actors.driver.prepare import prepare
from actors.engine.run_player import RunPlayer
from service.config import Config
from service.config.core_settings import batch_settings
from service.handoff.batches.batch import form_mini_batch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.prompt_order import Prompts
from service.handoff.steps.tables import ends_table
from service.learn.learner import Learner
from service.learn.settings import LearnSettings
from service.learn.supervised import SupervisedSteps
from service.rollout.engine import Generation, Sampling
from service.rollout.environment import Task
from service.rollout.step_sinks import StepColumns
from service.run.preparing.inputs import Prepared
from service.run.preparing.inputs import demonstrations as demonstration_rows
from service.types import Int32s, PolicyVersion, TrajectoryId

QUIET_SECONDS = 0.005
"""Seconds without a new request after which the waiting requests are sampled as a batch."""


class BatchedEngine:
    """Samples all waiting requests together, with the learner's weights; every request has its own seed."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
        self._seed = seed
        self._version = PolicyVersion(0, 0)
        self._waiting: list[tuple[Int32s, Sampling, str, asyncio.Future[Generation]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def update(self, learner: Learner) -> None:
        """Copy the learner's weights."""
        self._model.load_state_dict(learner.policy.weights() or {}, strict=False)
        self._version = PolicyVersion(0, learner.steps)

    async def generate(self, prompt_ids: Int32s, sampling: Sampling, request_id: str) -> Generation:
        """Sample one turn."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Generation] = loop.create_future()
        self._waiting.append((prompt_ids.copy(), sampling, request_id, future))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(QUIET_SECONDS, self._sample)
        return await future

    def _sample(self) -> None:
        requests, self._waiting = self._waiting, []
        generations = self._generations([(ids, sampling, name) for ids, sampling, name, _ in requests])
        for (*_, future), generation in zip(requests, generations, strict=True):
            if not future.done():
                future.set_result(generation)

    @torch.no_grad()
    def _generations(self, requests: Sequence[tuple[Int32s, Sampling, str]]) -> list[Generation]:
        sampling, width = requests[0][1], max(len(ids) for ids, *_ in requests)
        ids_BT = torch.zeros(len(requests), width, dtype=torch.int64)
        attended_BT = torch.zeros(len(requests), width, dtype=torch.int64)
        for b, (ids, *_) in enumerate(requests):
            ids_BT[b, width - len(ids) :], attended_BT[b, width - len(ids) :] = torch.from_numpy(ids), 1
        seeds = [xxhash.xxh3_64_intdigest(f"{self._seed}/{name}".encode()) for *_, name in requests]
        shape = (sampling.max_tokens, self._model.config.vocab_size)
        noise_BTV = torch.from_numpy(np.stack([np.random.default_rng(seed).gumbel(size=shape) for seed in seeds]))
        ends, cache, done_B = torch.tensor(sampling.stop_token_ids), None, torch.zeros(len(requests), dtype=torch.bool)
        sampled: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for t in range(sampling.max_tokens):
            position_BT = (attended_BT.cumsum(1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
            out = self._model(
                input_ids=ids_BT, attention_mask=attended_BT, position_ids=position_BT, past_key_values=cache
            )
            logprob_BV = (out.logits[:, -1].double() / sampling.temperature).log_softmax(-1)
            token_B = (logprob_BV + noise_BTV[:, t]).argmax(-1)
            sampled.append((token_B, logprob_BV.gather(1, token_B[:, None])[:, 0], ~done_B))
            done_B = done_B | torch.isin(token_B, ends)
            if done_B.all():
                break
            cache, ids_BT = out.past_key_values, token_B[:, None]
            attended_BT = torch.cat([attended_BT, torch.ones_like(ids_BT)], dim=1)
        token_BT, logprob_BT, live_BT = (torch.stack(column, dim=1).numpy() for column in zip(*sampled, strict=True))
        made = []
        for b, length in enumerate(live_BT.sum(axis=1).tolist()):
            token_ids, ended = token_BT[b, :length].astype(np.int32), bool(done_B[b])
            versions = np.full(length, self._version.pack(), np.int64)
            logprobs = logprob_BT[b, :length].astype(np.float32)
            made.append(Generation(token_ids, logprobs, versions, "stop" if ended else "length", ended))
        return made


def warm_started(config: Config, folder: Path) -> tuple[Prepared, Path]:
    """Return the prompts, and the model after its warm start."""
    prepared, started = prepare(config, folder), folder / "started"
    learner = Learner(LearnSettings.of(config.without_adapter), prepared.model_folder, torch.device("cpu"), 0, 1)
    rows = demonstration_rows(config.model, config.env, config.generator, config.run.seed, prepared.model_folder)
    SupervisedSteps(LearnSettings.of(config), learner.policy).warm_start(rows)
    learner.export(started)
    return prepared, started


async def rounds(
    config: Config, most: int, prepared: Prepared, model_folder: Path
) -> AsyncIterator[list[CompleteGroup]]:
    """Yield the groups of each of at most `most` mini-batches; a mini-batch is trained when the next is requested."""
    learner = Learner(LearnSettings.of(config), model_folder, torch.device("cpu"), 0, 1)
    engine = BatchedEngine(model_folder, config.run.seed)
    player = RunPlayer(config, model_folder, engine)
    prompts = Prompts([task.uid for task in prepared.tasks], config.run.seed, config.data.shuffle)
    history, settings = VersionHistory(), batch_settings(config)
    group_ids = iter(range(most * config.trainer.mini_batch_size))
    try:
        while chosen := list(islice(group_ids, config.trainer.mini_batch_size)):
            engine.update(learner)
            tasks = [prepared.tasks[prompts.row(group_id)] for group_id in chosen]
            playing = (played(player, o, task, config) for o, task in zip(chosen, tasks, strict=True))
            groups = await asyncio.gather(*playing)
            yield groups
            if learner.step(form_mini_batch(learner.steps, groups, history, settings)).applied:
                history.publish(PolicyVersion(0, learner.steps))
    finally:
        await player.close()


async def played(player: RunPlayer, group_id: int, task: Task, config: Config) -> CompleteGroup:
    """Play all trajectories of a group."""
    columns = StepColumns()
    samples = range(config.algorithm.n_samples_per_prompt)
    await asyncio.gather(*(player.play(TrajectoryId(group_id, sample), task, columns) for sample in samples))
    return CompleteGroup(group_id, task.uid, columns.steps(), ends_table(columns.ends))
