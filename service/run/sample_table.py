"""Sample trajectories as rows of a table with their texts, for trackers that show tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from service.config.model_folder import TOKENIZER, read_tokenizer

KEYS = ("id", "fate", "return", "advantage", "stop_reason", "sampled_tokens")
MAX_ROWS = 16
MAX_CHARACTERS = 20_000
"""Of a trajectory's text; the end is kept."""

_tokenizer = lru_cache(maxsize=1)(read_tokenizer)


def table_rows(records: Sequence[Mapping[str, Any]], model_folder: Path) -> list[dict[str, Any]]:
    """The rows of records as in `trajectories.jsonl`; the tokenizer is that of the model folder."""
    return [{key: record[key] for key in KEYS} | {"text": _text(record, model_folder)} for record in records[:MAX_ROWS]]


def _text(record: Mapping[str, Any], model_folder: Path) -> str:
    ids = [token for step in record["steps"] for token in (*step["prompt_ids"], *step["response_ids"])]
    return str(_tokenizer(model_folder / TOKENIZER).decode(ids, skip_special_tokens=False))[-MAX_CHARACTERS:]
