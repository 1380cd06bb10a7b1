"""SmolLM2-135M-Instruct, which `make real` prepares: `python -m benchmarks.real_model agreement` or `... games FOLDER`.

agreement    games sampled by the engine: their log-probabilities by engine, trainer and transformers, row by row
games        the fraction of `guess_number` games that the model of a folder wins in transformers, without the engine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from actors.engine.run_player import RunPlayer
from baton.examples.guess_number import LARGEST, GuessNumber, rows
from benchmarks.gpu.small_engine import by_row, serving
from service.config import Config, load
from service.config.core_settings import batch_settings
from service.handoff.batches.batch import form_mini_batch
from service.handoff.ledger.scores import CompleteGroup
from service.handoff.ledger.state import VersionHistory
from service.handoff.steps.tables import ends_table
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.rollout.environment import Message, Task
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.rows import write_rows
from service.rollout.step_sinks import StepColumns
from service.types import MiniBatch, PolicyVersion, TrajectoryId

MODEL, RECIPE = Path("models/SmolLM2-135M-Instruct"), Path("configs/smollm2_guess.yaml")
SETTINGS = ("trainer.ranks=1", "trainer.mini_batch_size=3", "algorithm.n_samples_per_prompt=8")


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("agreement", "games"))
    parser.add_argument("folders", nargs="*", type=Path, default=[MODEL])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sampled", type=int, default=0, help="sampled games beside the greedy ones")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # on busy cores several threads would wait for each other
    for folder in arguments.folders:
        if arguments.what == "agreement":
            found = agreement(folder, arguments.dtype)
        else:
            found = asyncio.run(games(folder, arguments.sampled))
        print(json.dumps({"folder": str(folder), **found}), flush=True)


def agreement(folder: Path, dtype: str) -> dict[str, float]:
    """Absolute differences, in nats, between the log-probabilities of the same sampled tokens."""
    config = load([RECIPE], [*SETTINGS, f"model.path={folder}", f"model.dtype={dtype}"]).config
    (micros,) = asyncio.run(_played(config, folder)).ranks
    policy = Policy(LearnSettings.of(config), folder, torch.device("cpu"), 0, 1)
    of_engine = np.concatenate([micro.logprobs_N[micro.loss_mask_N] for micro in micros])
    of_trainer = torch.cat(policy.logprobs([policy.to_device(micro) for micro in micros])).numpy()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    of_rows = np.concatenate([by_row(model, micro) for micro in micros])
    compared = {"engine_trainer": of_engine - of_trainer, "trainer_transformers": of_trainer - of_rows}
    return {"tokens": float(len(of_engine))} | {
        f"{name}_{kind}": float(take(np.abs(differences)))
        for name, differences in compared.items()
        for kind, take in (("mean", np.mean), ("largest", np.max))
    }


async def _played(config: Config, folder: Path) -> MiniBatch:
    """A mini-batch of games that vLLM played."""
    with tempfile.TemporaryDirectory() as name:
        write_rows(Path(name) / "rows.jsonl", rows(config.trainer.mini_batch_size, 0))
        tasks = load_tasks(Path(name) / "rows.jsonl")
    async with serving(config, folder) as engine:
        player = RunPlayer(config, folder, engine)
        groups = await asyncio.gather(*(_group(player, o, task, config) for o, task in enumerate(tasks)))
        await player.close()
    history = VersionHistory()
    history.publish(PolicyVersion(1, 0))
    return form_mini_batch(0, groups, history, batch_settings(config))


async def _group(player: RunPlayer, group_id: int, task: Task, config: Config) -> CompleteGroup:
    columns, samples = StepColumns(), range(config.algorithm.n_samples_per_prompt)
    await asyncio.gather(*(player.play(TrajectoryId(group_id, sample), task, columns) for sample in samples))
    return CompleteGroup(group_id, task.uid, columns.steps(), ends_table(columns.ends))


async def games(folder: Path, n_sampled: int) -> dict[str, float]:
    """The fraction of games that are won: with greedy decoding (one game per number), and with sampling."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    found = {"greedy": await _won(model, tokenizer, LARGEST, False)}
    return found | ({"sampled": await _won(model, tokenizer, n_sampled, True)} if n_sampled else {})


async def _won(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, n_games: int, sampled: bool) -> float:
    tasks = [Task("game", tuple(row["prompt"]), "guess_number", row["reward_spec"]) for row in rows(n_games, 0)]
    playing = [(GuessNumber(), list[Message](task.prompt)) for task in tasks]
    for (game, _), task in zip(playing, tasks, strict=True):
        await game.reset(task, 0)
    won = 0.0
    while playing:
        texts = _replies(model, tokenizer, [talk for _, talk in playing], sampled)
        going_on = []
        for (game, talk), text in zip(playing, texts, strict=True):
            answer = await game.step(text)
            won += answer.reward
            if not answer.done:
                going_on.append((game, [*talk, Message(role="assistant", content=text), *answer.messages]))
        playing = going_on
    return won / n_games


@torch.no_grad()
def _replies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, talks: list[list[Message]], sampled: bool
) -> list[str]:
    inputs = tokenizer.apply_chat_template(
        talks, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    how = {"do_sample": sampled, "pad_token_id": tokenizer.pad_token_id} | ({"top_k": 0} if sampled else {})
    written = model.generate(**inputs, max_new_tokens=4, **how)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in written[:, inputs["input_ids"].shape[1] :]]


if __name__ == "__main__":
    main()
