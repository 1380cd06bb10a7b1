"""What must lie on disk before a run starts: the prompts and the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from service.config import Config
from service.errors import UserError
from service.learn.make import make_model
from service.rollout.chat import Chat
from service.rollout.dataset import load_tasks, write_rows
from service.rollout.environment import Task
from service.rollout.environments import made
from service.rollout.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.warm_start import SupervisedRow, demonstration_rows


@dataclass(frozen=True)
class Prepared:
    """The inputs of a run, read and checked."""

    tasks_file: Path
    tasks: Sequence[Task]
    model_folder: Path
    vocab_size: int


def prepare(config: Config, folder: Path) -> Prepared:
    """Make what the configuration says to make, under `folder`; read and check the rest.

    Raises:
        UserError: a file or folder is missing or malformed; the message names it.
    """
    if config.data.make_rows is not None:
        tasks_file = folder / "data" / "train.jsonl"
        tasks_file.parent.mkdir(parents=True, exist_ok=True)
        if not tasks_file.exists():
            write_rows(tasks_file, made(config.env.name).rows(config.data.make_rows, config.run.seed))
    elif config.data.train is not None:
        tasks_file = config.data.train
    else:
        raise UserError("data: neither train nor make_rows is set; name a JSONL or parquet file in data.train")
    model_folder = config.model.path or _make_policy(config, folder / "model")
    if not (model_folder / "config.json").is_file():
        raise UserError(f"model.path: {model_folder} is not a Hugging Face model folder (it has no config.json)")
    tokenizer = load_tokenizer(model_folder)
    return Prepared(tasks_file, load_tasks(tasks_file), model_folder, len(tokenizer))


def demonstrations(config: Config, model_folder: Path) -> list[SupervisedRow]:
    """Tokenised demonstrations of the environment for the warm start, with True on the tokens to learn."""
    warm_start = config.model.warm_start
    if warm_start is None:
        return []
    rng = np.random.default_rng(config.run.seed)
    conversations = made(config.env.name).demonstrations(warm_start.demonstrations, warm_start.right_share, rng)
    return demonstration_rows(Chat(load_tokenizer(model_folder)), conversations)


def _make_policy(config: Config, folder: Path) -> Path:
    """Write a small untrained model with a tokenizer for the environment's words, unless a resumed run has it."""
    if (folder / "config.json").exists():
        return folder
    if config.model.make is None:
        raise UserError("model: neither path nor make is set; name a Hugging Face folder in model.path")
    make_tokenizer(folder, made(config.env.name).vocabulary())
    tokenizer = load_tokenizer(folder)
    make_model(
        folder,
        config.model.make,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=config.run.seed,
    )
    return folder
