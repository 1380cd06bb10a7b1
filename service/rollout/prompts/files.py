"""Makes a run's files of prompts: as given, with columns renamed (`data.columns`), mixed (`data.mixture`) or made.

A published row of GSM8K with the columns {prompt: question, ground_truth: answer, answer: hashes}:

    in the file    {"question": "2 and 3 apples?", "answer": "2 + 3 = 5\\n#### 5"}
    as read        {"prompt": "2 and 3 apples?", "reward_spec": {"method": "rule", "ground_truth": "5"}}

An epoch of a mixture contains every row at least once. With `a` of 4 rows and weight 1, and `b` of 2 rows and weight 3:

    fractions 1/4 and 3/4; an epoch has 16 rows: each of the 4 rows of `a` once, and each of the 2 rows of `b` six times
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from service.config.rollout import MADE_SET, ColumnsConfig, DataConfig, EnvConfig, MixturePart
from service.errors import UserError
from service.rollout.environments.registry import synthetic_data
from service.rollout.prompts.dataset import tasks_of
from service.rollout.prompts.rows import MESSAGES, is_joined, read_rows, row_place, write_rows

BOX = "\\boxed{"
EVAL_SEED = 1 << 32
"""Number that is added to the seed of synthetic evaluation rows, so that they differ from the training rows."""
MAX_REPETITIONS = 100
"""Largest allowed ratio of an epoch's rows to the rows of all datasets. Weights that need a larger ratio are
refused."""


def train_file(data: DataConfig, env: EnvConfig, folder: Path, seed: int) -> Path:
    """The file of training prompts: the configured file, or a file in `folder` if rows must be made, mixed or renamed.

    An existing file in `folder` is kept, so that a resumed run has the same prompts.

    Raises:
        UserError: nothing is configured, or a dataset is malformed.
    """
    if data.train is not None:
        return _file_of(data.train, data.columns, folder / "train.jsonl")
    if data.make_rows is None and not data.mixture:
        raise UserError("data: none of train, make_rows and mixture is set; name a JSONL or parquet file in data.train")
    path = folder / "train.jsonl"
    if not path.exists():
        rows = (
            mixed_rows(data.mixture, data.columns)
            if data.make_rows is None
            else synthetic_data(env.name, env.trusted_modules, "rows")(data.make_rows, seed)
        )
        write_rows(path, rows)
    return path


def eval_files(data: DataConfig, env: EnvConfig, folder: Path, seed: int) -> dict[str, Path]:
    """The file of each evaluation set, by name; synthetic rows have another seed than the training rows."""
    files = {name: _file_of(path, data.columns, folder / f"eval_{name}.jsonl") for name, path in data.eval.items()}
    if data.eval_make_rows is not None:
        files[MADE_SET] = folder / "eval.jsonl"
        if not files[MADE_SET].exists():
            rows = synthetic_data(env.name, env.trusted_modules, "rows")
            write_rows(files[MADE_SET], rows(data.eval_make_rows, seed + EVAL_SEED))
    return files


def _file_of(path: Path, columns: ColumnsConfig | None, renamed: Path) -> Path:
    """The file itself; or, for several files or columns to rename, the file `renamed` with all rows."""
    if columns is None and not is_joined(path):
        return path
    if not renamed.exists():
        rows = read_published(path, columns)
        uids = [task.uid for task in tasks_of(rows, path)]
        write_rows(renamed, ({**row, "uid": uid} for row, uid in zip(rows, uids, strict=True)))
    return renamed


def mixed_rows(parts: Mapping[str, MixturePart], columns: ColumnsConfig | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one epoch, with the datasets evenly interleaved. A row's uid becomes `<dataset>/<uid>`; repetitions
    of the row get `#1`, `#2` and so on at the end.

    Raises:
        UserError: a dataset is malformed, or the weights need too many repetitions.
    """
    rows = {name: read_published(part.path, columns) for name, part in parts.items()}
    uids = {name: [task.uid for task in tasks_of(rows[name], part.path)] for name, part in parts.items()}
    lengths = _lengths({name: len(rows[name]) for name in parts}, {name: part.weight for name, part in parts.items()})
    # Each row has a position in the epoch, between 0 and 1; sort by it.
    places = sorted(((i + 0.5) / length, name, i) for name, length in lengths.items() for i in range(length))
    for _, name, i in places:
        passes, row = divmod(i, len(rows[name]))
        uid = f"{name}/{uids[name][row]}" + (f"#{passes}" if passes else "")
        yield {**rows[name][row], "uid": uid}


def _lengths(sizes: Mapping[str, int], weights: Mapping[str, float]) -> dict[str, int]:
    """Number of rows of each dataset in one epoch."""
    total_weight = sum(weights.values())
    fractions = {name: weight / total_weight for name, weight in weights.items()}
    largest = max(sizes, key=lambda name: sizes[name] / fractions[name])
    total = sizes[largest] / fractions[largest]
    if total > MAX_REPETITIONS * sum(sizes.values()):
        fraction = f"{fractions[largest]:.2g}"
        raise UserError(
            f"data.mixture.{largest}.weight: its {sizes[largest]} rows are to be {fraction} of all prompts, "
            f"so an epoch would repeat the others up to {total:.3g} rows; give it a larger weight, or fewer rows"
        )
    return {name: max(sizes[name], round(total * fraction)) for name, fraction in fractions.items()}


def read_published(path: Path, columns: ColumnsConfig | None) -> list[Any]:
    """The rows of a data set, with their columns renamed to the names that Baton reads. A row that has these names is
    unchanged.

    Raises:
        UserError: the file cannot be read, or a row lacks a column or an answer.
    """
    rows = read_rows(path)
    return rows if columns is None else [_row(row, columns, path, number) for number, row in enumerate(rows)]


def _row(row: Any, columns: ColumnsConfig, path: Path, number: int) -> Any:
    if not isinstance(row, Mapping):
        return row  # `tasks_of` refuses the row later
    found = dict(row)
    if columns.prompt in found:
        found["prompt"] = found.pop(columns.prompt)
    elif "prompt" not in found:
        lacking = f"there is no column {columns.prompt!r} (data.columns.prompt), only {[*row]!s:.200}"
        raise UserError(f"{row_place(path, number)}: {lacking}")
    if columns.ground_truth in found:
        text = str(given := found.pop(columns.ground_truth))
        answer = {"text": text, "hashes": after_hashes(text), "boxed": boxed(text)}[columns.answer]
        if not answer or isinstance(given, list | Mapping):
            raise UserError(
                f"{row_place(path, number)}, column {columns.ground_truth}: no answer of the form {columns.answer} "
                f"(data.columns.answer) in {text[-80:]!r}"
            )
        found["reward_spec"] = {"method": "rule", "ground_truth": answer}
    elif columns.ground_truth is not None and not {"reward_spec", "reward_model"} & found.keys():
        lacking = f"there is no column {columns.ground_truth!r} (data.columns.ground_truth), only {[*row]!s:.200}"
        raise UserError(f"{row_place(path, number)}: {lacking}")
    if columns.instruction and isinstance(found["prompt"], str) and not MESSAGES.match(found["prompt"]):
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
