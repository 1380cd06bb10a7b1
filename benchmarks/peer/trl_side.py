"""TRL's side, which runs in the peers' environment: `GRPOTrainer` with a `rollout_func` of batched turns.

All open trajectories take their next turn together: one call of vLLM in this process, and then all environments
concurrently. The trainer gets the settings of the recipe: the tokens of each prompt and turn, limits, sampling,
estimator, clipping, learning rate, and the same engine settings. The correction for differences between engine and
trainer is off, because it would cost another forward pass. Only the last step, which does not count, has the
correction, because with it TRL compares the log-probabilities of both.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from service.config import Config
from service.rollout.chat.chat import Chat, load_chat
from service.rollout.environment import Environment, Task
from service.rollout.factory import Environments
from service.rollout.prompts.dataset import load_tasks

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
"""Environment variables that are set before vLLM is imported: the engine runs in this process, with the settings of
Baton's engines."""

DIFFERENCE = "sampling/sampling_logp_difference/max"
"""TRL's metric of the largest difference between the log-probabilities of engine and trainer."""


class Episode:
    """One trajectory so far: its prompt, and the tokens after it."""

    def __init__(self, task: Task, environment: Environment, chat: Chat) -> None:
        self.environment = environment
        self.prompt_ids: list[int] = chat.prompt(task.prompt).tolist()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.sampled: list[int] = []
        """1 for each token of the policy, 0 for each token of the environment."""
        self.reward = 0.0
        self.done = False

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float], sampled: bool) -> None:
        """Append tokens."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.sampled += [int(sampled)] * len(token_ids)


class Turn(NamedTuple):
    """The tokens that were sampled for one trajectory."""

    token_ids: list[int]
    logprobs: list[float]
    ended: bool
    """Whether the policy ended its turn."""


Sampler = Callable[[list[list[int]]], list[Turn]]
"""Samples the next turn after each of these token lists."""


class Rollouts:
    """The `rollout_func` of TRL's trainer."""

    def __init__(self, config: Config, model_folder: Path, tasks: Sequence[Task]) -> None:
        self._config = config
        self._chat = load_chat(model_folder, config.generator)
        self._environments = Environments(config.env)
        self._tasks = {task.uid: task for task in tasks}

    def __call__(self, uids: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Play a trajectory for each uid."""
        return asyncio.run(self._play(uids, self._sampler(trainer)))

    def _sampler(self, trainer: Any) -> Sampler:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=self._config.generator.max_generate_length - 1,  # leaves room for an appended end
            temperature=self._config.generator.temperature,
            stop_token_ids=list(self._chat.end_ids),
            logprobs=0,
            detokenize=False,
        )

        def turn(output: Any) -> Turn:
            token_ids = list(output.token_ids)
            logprobs = [at[token].logprob for at, token in zip(output.logprobs, token_ids, strict=True)]
            return Turn(token_ids, logprobs, output.finish_reason == "stop")

        def turns(prompts: list[list[int]]) -> list[Turn]:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = trainer.vllm_generation.llm.generate(asked, sampling, use_tqdm=False)
            return [turn(output.outputs[0]) for output in outputs]

        return turns

    async def _play(self, uids: list[str], sampled: Sampler) -> dict[str, list[Any]]:
        tasks = [self._tasks[uid] for uid in uids]
        episodes = [Episode(task, self._environments.make(task), self._chat) for task in tasks]
        await asyncio.gather(*(e.environment.reset(task, 0) for e, task in zip(episodes, tasks, strict=True)))
        for turn in range(self._config.env.max_turns):
            if not (open_ones := [episode for episode in episodes if not episode.done]):
                break
            turns = sampled([episode.prompt_ids + episode.token_ids for episode in open_ones])
            last = turn == self._config.env.max_turns - 1
            await asyncio.gather(*(self._turn(e, one, last) for e, one in zip(open_ones, turns, strict=True)))
        return {
            "prompt_ids": [episode.prompt_ids for episode in episodes],
            "completion_ids": [episode.token_ids for episode in episodes],
            "logprobs": [episode.logprobs for episode in episodes],
            "env_mask": [episode.sampled for episode in episodes],
            "reward": [episode.reward for episode in episodes],
        }

    async def _turn(self, episode: Episode, turn: Turn, last: bool) -> None:
        """Append a response, and the environment's answer to it, to the episode."""
        episode.take(turn.token_ids, turn.logprobs, sampled=True)
        if not turn.ended:
            episode.take([self._chat.end_id], [0.0], sampled=False)
        result = await episode.environment.step(self._chat.text(np.array(turn.token_ids, np.int32)))
        episode.reward, episode.done = result.reward, result.done
        if not (last or result.done):
            delta = self._chat.delta(result.messages, episode.token_ids[-1]).tolist()
            episode.take(delta, [0.0] * len(delta), sampled=False)


def sync_weights(generation: Any) -> None:
    """Replaces `VLLMGeneration.sync_weights`: vLLM's CPU build packs its weights, so they can only be reloaded."""
    from actors.engine.worker_extension import repack_for_cpu

    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    runner.reload_weights(weights_iterator=generation._iter_named_params())
    repack_for_cpu(runner.model)
    generation.llm.reset_prefix_cache()


def _fit_vllm(config: Config) -> None:
    """Give TRL's engine the settings that TRL does not pass on; vLLM would convert a float32 model to 16 bits."""
    import trl.generation.vllm_generation as generation

    generation.LLM = partial(
        generation.LLM,
        dtype=config.model.dtype,
        hf_overrides={"head_dtype": "float32"},
        enforce_eager=config.generator.enforce_eager,
        kv_cache_memory_bytes=config.generator.kv_cache_bytes,
    )
    generation.VLLMGeneration.sync_weights = sync_weights


def trained(config: Config, model_folder: Path, tasks_file: Path, work: Path, threads: int) -> dict[str, Any]:
    """Train for `run.max_steps`; returns the state and the reward after each step, and the largest difference between
    the log-probabilities of engine and trainer, in the last step, which does not count."""
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    tasks = load_tasks(tasks_file)
    found: dict[str, Any] = {"looks": [], "rewards": [], "difference": math.nan}
    _fit_vllm(config)

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # TRL compares the log-probabilities only with this setting, which costs a forward pass
            grpo.vllm_importance_sampling_correction = state.global_step == state.max_steps - 1

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "reward" in logs:
                found["looks"].append((state.global_step, time.monotonic(), time.process_time()))
                found["rewards"].append(float(logs["reward"]))
                found["difference"] = float(logs.get(DIFFERENCE, math.nan))

    trainer, algorithm = config.trainer, config.algorithm
    samples = trainer.mini_batch_size * algorithm.n_samples_per_prompt
    settings = GRPOConfig(
        output_dir=str(work),
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        max_steps=config.run.max_steps,
        seed=config.run.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples,
        num_generations=algorithm.n_samples_per_prompt,
        learning_rate=trainer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=trainer.warmup_steps,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        loss_type="dapo",  # the mean over tokens
        temperature=config.generator.temperature,
        max_completion_length=config.generator.max_generate_length - 1,  # of one turn
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=config.generator.max_input_length + config.generator.max_generate_length,
        vllm_importance_sampling_correction=False,
    )
    grpo = GRPOTrainer(
        model=str(model_folder),
        reward_funcs=lambda reward, **_: reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": [task.uid for task in tasks]}),
        rollout_func=Rollouts(config, model_folder, tasks),
        callbacks=[Watch()],
    )
    grpo.remove_callback(PrinterCallback)
    grpo.train()
    return found


def main(config_file: str, model_folder: str, tasks_file: str, work: str, threads: str) -> None:
    """Train, and write what was found to `work`/found.json."""
    config = Config.model_validate_json(Path(config_file).read_text())
    found = trained(config, Path(model_folder), Path(tasks_file), Path(work), int(threads))
    (Path(work) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
