"""The inputs of `baton sft`: the model and the conversations, read and checked."""

from __future__ import annotations

from pathlib import Path

from service.config import DataConfig, GeneratorConfig, ModelConfig
from service.errors import UserError
from service.rollout.chat.chat import load_chat
from service.rollout.prompts.conversations import conversation_rows
from service.run.inputs import checked_model, checked_shapes
from service.types import SupervisedRow


def read_conversations(
    model: ModelConfig, data: DataConfig, generator: GeneratorConfig
) -> tuple[Path, list[SupervisedRow], dict[str, list[SupervisedRow]]]:
    """The model's folder, checked, the rows to learn, and those of each evaluation set.

    Raises:
        UserError: the model or a row is malformed, or supervised training does not support a setting.
    """
    if model.path is None or model.warm_start is not None:
        needed = "the folder of a model, and takes the place of the warm start"
        raise UserError(f"model.path: baton sft needs {needed}; add model.make=null model.warm_start=null")
    if data.train is None:
        raise UserError("data.train: there are no conversations; give a JSONL or parquet file of them")
    checked_shapes(model, model.path, checked_model(model.path)[0])
    how = load_chat(model.path, generator), generator.conversation, generator.longest_row
    held_out = {name: conversation_rows(file, *how)[: data.eval_rows] for name, file in data.eval.items()}
    return model.path, conversation_rows(data.train, *how), held_out
