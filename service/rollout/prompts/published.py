"""Reads published datasets that have other column names; `data.columns` names the columns of the prompt and the answer.

A row of GSM8K with the columns {prompt: question, ground_truth: answer, answer: hashes}:

    in the file    {"question": "2 and 3 apples?", "answer": "2 + 3 = 5\\n#### 5"}
    as read        {"prompt": "2 and 3 apples?", "reward_spec": {"method": "rule", "ground_truth": "5"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.config.rollout import ColumnsConfig
from service.errors import UserError
from service.rollout.prompts.dataset import read_rows

BOX = "\\boxed{"


def read_published(path: Path, columns: ColumnsConfig | None) -> list[Any]:
    """The rows of a file, with their columns renamed to those that Baton reads; a row that already has these columns is
    unchanged.

    Raises:
        UserError: the file cannot be read, or a row lacks a column or an answer.
    """
    rows = read_rows(path)
    return rows if columns is None else [_row(row, columns, f"dataset {path}, row {n}") for n, row in enumerate(rows)]


def _row(row: Any, columns: ColumnsConfig, where: str) -> Any:
    if not isinstance(row, Mapping):
        return row  # refused with the rows of all files
    found = dict(row)
    if columns.prompt in found:
        found["prompt"] = found.pop(columns.prompt)
    elif "prompt" not in found:
        raise UserError(f"{where}: there is no column {columns.prompt!r} (data.columns.prompt), only {_names(row)}")
    if columns.ground_truth in found:
        given = found.pop(columns.ground_truth)
        text = "" if given is None else str(given)
        answer = {"text": text, "hashes": after_hashes(text), "boxed": boxed(text)}[columns.answer]
        if not answer:
            raise UserError(
                f"{where}, column {columns.ground_truth}: no answer of the form {columns.answer} (data.columns.answer) "
                f"in {text[-80:]!r}"
            )
        found["reward_spec"] = {"method": "rule", "ground_truth": answer}
    elif columns.ground_truth is not None and not {"reward_spec", "reward_model"} & found.keys():
        raise UserError(
            f"{where}: there is no column {columns.ground_truth!r} (data.columns.ground_truth), only {_names(row)}"
        )
    if columns.instruction and isinstance(found["prompt"], str):
        found["prompt"] += f"\n{columns.instruction}"
    return found


def after_hashes(text: str) -> str | None:
    """The text after the last `####` (GSM8K's mark of the final answer); None if there is no `####`.

    >>> after_hashes("2 + 3 = 5 #### 5")
    '5'
    """
    _, marked, answer = text.rpartition("####")
    return answer.strip() if marked else None


def boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{}`; None if the text has no closed `\boxed{}`.

    >>> boxed(r"so it is $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    start = text.rfind(BOX) + len(BOX)
    depth = 1
    for end, character in enumerate(text[start:] if start >= len(BOX) else "", start):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[start:end].strip()
    return None


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in row)[:200]
