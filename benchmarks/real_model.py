"""SmolLM2-135M-Instruct, which `make real` prepares: `python -m benchmarks.real_model agreement` or `... games FOLDER`.

agreement    log-probabilities of sampled turns: by the engine, by the trainer, and by transformers, row by row
games        how many games of `guess_number` a Hugging Face folder wins in transformers, without Baton's engine
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from baton.examples.guess_number import LARGEST, GuessNumber, rows
from benchmarks.gpu.small_engine import serving, settings
from service.config.tree import Config
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.rollout.engine import Sampling
from service.rollout.environment import Message, Task
from service.types import MicroBatch

MODEL = Path("models/SmolLM2-135M-Instruct")
TURNS, TOKENS, TEMPERATURE = 32, 24, 1.0


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("agreement", "games"))
    parser.add_argument("folders", nargs="*", type=Path, default=[MODEL])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sampled", type=int, default=0, help="sampled games beside the greedy ones")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if arguments.what == "agreement":
            found = agreement(folder, arguments.dtype)
        else:
            found = asyncio.run(games(folder, arguments.sampled))
        print(json.dumps({"folder": str(folder), **found}), flush=True)


def agreement(folder: Path, dtype: str) -> dict[str, float]:
    """Nats between the log-probabilities of the same sampled tokens, as absolute values."""
    config = settings("float32" if dtype == "float32" else "bfloat16")
    (row,) = rows(1, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    sampled, of_engine = asyncio.run(_sampled(config, folder, np.array(prompt, np.int32)))
    policy = Policy(LearnSettings.of(config), folder, torch.device("cpu"), 0, 1)
    of_trainer = policy.logprobs([policy.to_device(sampled)])[0].numpy()
    of_rows = _by_row(folder, sampled, getattr(torch, dtype))
    compared = {"engine_trainer": of_engine - of_trainer, "trainer_transformers": of_trainer - of_rows}
    return {"tokens": float(len(of_engine))} | {
        f"{name}_{kind}": float(take(np.abs(differences)))
        for name, differences in compared.items()
        for kind, take in (("mean", np.mean), ("largest", np.max))
    }


async def _sampled(config: Config, folder: Path, prompt: np.ndarray) -> tuple[MicroBatch, np.ndarray]:
    """Turns as rows of one micro-batch, and the engine's log-probabilities of the sampled tokens."""
    sampling = Sampling(max_tokens=TOKENS, temperature=TEMPERATURE)
    async with serving(config, folder) as engine:
        turns = await asyncio.gather(*(engine.generate(prompt, sampling, str(number)) for number in range(TURNS)))
    sequences = [np.concatenate([prompt, turn.token_ids]) for turn in turns]
    mask_N = np.concatenate([np.arange(len(tokens)) >= len(prompt) for tokens in sequences])
    batch = MicroBatch(
        token_ids_N=np.concatenate(sequences),
        offsets_R=np.cumsum([0, *map(len, sequences)], dtype=np.int64),
        loss_mask_N=mask_N,
        logprobs_N=np.zeros(len(mask_N), np.float32),
        staleness_N=np.where(mask_N, 0, -1).astype(np.int32),
        temperature_R=np.full(TURNS, TEMPERATURE, np.float32),
        trajectory_of_row_R=np.arange(TURNS, dtype=np.int32),
    )
    return batch, np.concatenate([turn.logprobs for turn in turns if turn.logprobs is not None])


@torch.no_grad()
def _by_row(folder: Path, batch: MicroBatch, dtype: torch.dtype) -> np.ndarray:
    """The same log-probabilities by transformers' own forward pass of each row alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    found = []
    for start, stop in zip(batch.offsets_R[:-1], batch.offsets_R[1:], strict=True):
        ids_T = torch.from_numpy(batch.token_ids_N[start:stop]).long()
        table_TV = (model(ids_T[None]).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
        of_T = table_TV.gather(1, ids_T[1:, None])[:, 0]
        found.append(of_T[torch.from_numpy(batch.loss_mask_N[start + 1 : stop])].numpy())
    return np.concatenate(found)


async def games(folder: Path, n_sampled: int) -> dict[str, float]:
    """The fraction of games that are won, with the likeliest tokens (one game a number), and sampled."""
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
