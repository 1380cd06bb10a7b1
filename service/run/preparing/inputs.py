"""Prepares the inputs of a run, an evaluation or `baton sft`: reads or makes data and models, and checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from service.config import DataConfig, EnvConfig, GeneratorConfig, LoraConfig, ModelConfig
from service.errors import UserError
from service.files import free_memory
from service.handoff.steps.values import Routing
from service.learn.checkpoint import check_parts, read_metadata
from service.learn.model.adapter_folder import Base, check_adapter
from service.learn.model.hf_checkpoint import check_weights
from service.learn.model.hf_config import code_of_the_model, read_config, unread_weights
from service.learn.model.policy_model import stored_shapes, trained_shapes
from service.learn.model.tiny_model import count_parameters, make_model
from service.model_folder import check_vocabulary, is_model_folder
from service.rollout.chat.chat import load_chat
from service.rollout.chat.tokenizer import load_tokenizer, make_tokenizer
from service.rollout.check_inputs import check_environments
from service.rollout.environment import Task
from service.rollout.environments.registry import synthetic_data
from service.rollout.prompts.conversations import conversation_rows, rows_with_loss_mask, unknown_note
from service.rollout.prompts.dataset import load_tasks
from service.rollout.prompts.files import eval_files
from service.run.checkpoints import TRAINER, Manifest
from service.run.folder import DATA
from service.run.phases import say
from service.run.preparing.eval_target import EvalTarget
from service.types import SupervisedRow

TRAINING_BYTES = 16
"""Bytes per parameter in training: master weight, gradient and Adam's two moments, each in float32."""


@dataclass(frozen=True)
class Prepared:
    """The inputs of a run after they were read and checked."""

    tasks_file: Path
    tasks: Sequence[Task]
    model_folder: Path
    vocab_size: int
    """Rows of the model's head: all token ids are below it."""
    routing: Routing
    """The form in which the model's routed experts are recorded for router replay."""
    eval_files: Mapping[str, Path] = field(default_factory=dict)
    """File of each evaluation set, by name."""
    warmed_model: Path | None = None
    """The folder to which the warm start writes the base model of the adapter; None if there is no such model."""

    @property
    def base(self) -> Path:
        """The Hugging Face folder whose weights the trainer and the engines load when RL begins."""
        return self.warmed_model or self.model_folder


def check_first_adapter(model: ModelConfig) -> None:
    """Raises `UserError` if a run would refuse `model.adapter`. Does nothing if the adapter or its base model is not on
    this machine."""
    if model.path is not None and is_model_folder(model.path) and model.adapter is not None and model.adapter.exists():
        checked_shapes(model, model.path, checked_model(model.path))


def checked_shapes(model: ModelConfig, folder: Path, hf_config: PretrainedConfig) -> None:
    """Raises `UserError` if the model in a folder cannot be trained with the settings `model.lora` and
    `model.adapter`."""
    if model.lora is not None:
        shapes = trained_shapes(hf_config, model.lora)
        if model.adapter is not None:
            check_adapter(model.adapter, model.lora, Base.of(folder), shapes)


def checked_model(folder: Path) -> PretrainedConfig:
    """Read the configuration of a model folder. `UserError` if the configuration, the tokenizer and the weights do not
    match."""
    hf_config = read_config(folder)
    check_vocabulary(folder, load_tokenizer(folder))
    with code_of_the_model(folder):
        shapes = stored_shapes(hf_config)
    check_weights(folder, shapes, unread_weights(hf_config))
    return hf_config


def prepare_weights(model: ModelConfig, target: EvalTarget) -> Manifest | None:
    """Check the weights to evaluate. Returns the manifest of their checkpoint; None for a Hugging Face folder or a
    final adapter. `UserError` if model, tokenizer or checkpoint is missing, damaged, or of another run."""
    if target.model is not None:
        try:
            checked_model(target.model)
        except UserError as error:
            raise UserError(str(error).removeprefix("model.path: ")) from error
        return None
    manifest = target.manifest() if target.adapter is None else None
    begun_with = target.begun_with(model)
    hf_config = checked_model(begun_with)
    if manifest is not None:
        check_checkpoint(model.lora, begun_with, target.weights(manifest))
        return manifest
    adapter = target.weights(None)
    if model.lora is None:
        raise UserError(f"{target.path}: {adapter} is an adapter, but the configuration has no model.lora; add it")
    check_adapter(adapter, model.lora, Base.of(begun_with), trained_shapes(hf_config, model.lora))
    return None


def check_checkpoint(lora: LoraConfig | None, begun_with: Path, checkpoint: Path) -> None:
    """Raises `UserError` if a checkpoint is damaged, or has another model or adapter than the run that would continue
    from it. `begun_with`: the folder of the model that the run trains, or adds an adapter to."""
    parts = checkpoint / TRAINER
    shapes = trained_shapes(read_config(begun_with), lora)
    base, alpha = (None, None) if lora is None else (Base.of(begun_with), lora.alpha)
    check_parts(parts, read_metadata(parts), shapes, base, alpha)


def prepare_evaluation(data: DataConfig, env: EnvConfig, seed: int, folder: Path) -> dict[str, Path]:
    """Return the file of each evaluation set, by name; make the file if its rows are synthetic. `UserError` if a set is
    missing or malformed, or its environment cannot be made."""
    files = eval_files(data, env, folder / DATA, seed)
    for path in files.values():
        check_environments(env, load_tasks(path), path)
    return files


def demonstrations(
    model: ModelConfig, env: EnvConfig, generator: GeneratorConfig, seed: int, model_folder: Path
) -> list[SupervisedRow]:
    """The environment's demonstrations for the warm start, as token ids with a loss mask; empty without
    `model.warm_start`."""
    if (warm_start := model.warm_start) is None:
        return []
    make, rng = synthetic_data(env.name, env.trusted_modules, "demonstrations"), np.random.default_rng(seed)
    conversations = make(warm_start.demonstrations, warm_start.right_fraction, rng)
    return rows_with_loss_mask(load_chat(model_folder, generator), generator.conversation, conversations)


def read_conversations(
    model: ModelConfig, data: DataConfig, generator: GeneratorConfig
) -> tuple[Path, list[SupervisedRow], dict[str, list[SupervisedRow]]]:
    """Read the inputs of `baton sft`: the folder of the model, the training rows, and the rows of each evaluation set.
    `UserError` if one is malformed, or supervised training does not support a setting."""
    if model.path is None or model.warm_start is not None:
        needed = "the folder of a model, and takes the place of the warm start"
        raise UserError(f"model.path: baton sft needs {needed}; add model.make=null model.warm_start=null")
    if data.train is None:
        raise UserError("data.train: there are no conversations; give a JSONL or parquet file of them")
    checked_shapes(model, model.path, checked_model(model.path))
    chat = load_chat(model.path, generator)
    how = chat, generator.conversation, generator.longest_row
    held_out = {name: conversation_rows(file, *how)[: data.eval_rows] for name, file in data.eval.items()}
    train = conversation_rows(data.train, *how)
    if note := unknown_note(train, chat):
        say(f"NOTE {data.train}: {note}")
    for note in chat.notes(has_tools=False):
        say(f"NOTE {note}")
    return model.path, train, held_out


def make_policy(model: ModelConfig, env: EnvConfig, seed: int, folder: Path) -> Path:
    """Write a small model with random weights and a tokenizer for the environment's words, and return its folder. (A
    resumed run has the model already.) `UserError` if no model is configured, or this machine has too little memory to
    train it."""
    if is_model_folder(folder):
        return folder
    if model.make is None:
        raise UserError("model: neither path nor make is set; name a Hugging Face folder in model.path")
    make_tokenizer(folder, synthetic_data(env.name, env.trusted_modules, "vocabulary")())
    tokenizer = load_tokenizer(folder)
    parameters = count_parameters(model.make.dimensions, len(tokenizer))
    needed, free = parameters * TRAINING_BYTES, free_memory()
    if needed > free:
        raise UserError(
            f"model.make: training {parameters} parameters takes {needed >> 20} MiB, {free >> 20} MiB are free; make "
            "it smaller"
        )
    make_model(
        folder,
        model.make.dimensions,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=seed,
    )
    return folder
