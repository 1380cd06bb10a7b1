"""Writes the files of a run folder: configuration, metrics, curve, trajectories, evaluations, summary."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from service.config import WandbConfig
from service.errors import printable
from service.files import atomic_file, write_atomic
from service.model_folder import TOKENIZER, read_tokenizer
from service.observe.plot import draw_learning_curve
from service.observe.trackers import TensorBoard, Wandb, open_trackers
from service.run.folder import (
    CONFIG,
    EVALUATIONS,
    LOGS,
    METRICS,
    SUMMARY,
    TARGETS,
    TRAJECTORIES,
    TRAJECTORIES_BYTES,
    read_lines,
)

BLOCK = 1 << 16
"""Bytes that are read at once when looking for the end of the last line."""
TABLE_STEPS = 10
"""Optimizer steps between two tables of sample trajectories in a tracker."""
TABLE_KEYS = ("id", "fate", "return", "advantage", "stop_reason", "sampled_tokens")
TABLE_ROWS = 16
TABLE_CHARACTERS = 20_000
"""Maximum characters of a trajectory's text in a tracker's table. Only the end of a longer text is kept."""

_tokenizer = lru_cache(maxsize=1)(read_tokenizer)


class RunWriter:
    """Writes the files of one run. Files are replaced atomically; lines are appended and flushed."""

    def __init__(self, path: Path, has_begun: bool = True) -> None:
        self.path = Path(path)
        self._has_begun = has_begun
        """False for a resumed run until it continues. If the run ends earlier, its summary and scrape targets stay."""
        (self.path / LOGS).mkdir(parents=True, exist_ok=True)
        self._metrics: TextIO | None = None
        self._trackers: list[TensorBoard | Wandb] = []
        self._resolved = ""
        self._wandb: WandbConfig | None = None
        self._model_folder = Path()
        self._kept: list[Mapping[str, Any]] = []
        """Trajectories of the current step, for a tracker's table."""
        self._targets: Sequence[Mapping[str, Any]] = ()
        self.step = 0
        """The optimizer step that was logged last."""
        self.has_final = False
        """Whether the final weights are the weights of the step `step`."""

    def begin(self, resolved: str, wandb: WandbConfig | None = None, model_folder: Path | None = None) -> None:
        """Begin or continue a run: delete the summary of an earlier process, and write the resolved configuration.
        `model_folder`: has the tokenizer for texts in Weights & Biases."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        self._has_begun, self._resolved, self._wandb = True, resolved, wandb
        self._model_folder = model_folder or Path()
        write_atomic(self.path / CONFIG, resolved)

    def write_targets(self, targets: Sequence[Mapping[str, Any]]) -> None:
        """Write the scrape targets of this run for Prometheus, in the format of its file-based service discovery."""
        if targets != self._targets:
            self._targets_file.parent.mkdir(exist_ok=True)
            write_atomic(staged := self.path / TARGETS, json.dumps(targets) + "\n")
            os.replace(staged, self._targets_file)  # Prometheus reads every file that is in its folder
            self._targets = targets

    def delete_targets(self) -> None:
        """Delete the scrape targets, so that Prometheus stops scraping this run."""
        if self._has_begun:
            self._targets_file.unlink(missing_ok=True)

    @property
    def _targets_file(self) -> Path:
        return self.path.parent / TARGETS / f"{self.path.name}.json"

    def log_step(self, numbers: Mapping[str, float], texts: Mapping[str, str] | None = None) -> None:
        """Log an optimizer step: append numbers and texts as a line to `metrics.jsonl`, and send the numbers to the
        trackers. `numbers` must have `trainer/global_step`."""
        if "trainer/global_step" not in numbers:
            raise ValueError("a line of metrics.jsonl needs trainer/global_step")
        if self._metrics is None:
            self._metrics = _append_lines(self.path / METRICS)
            self._trackers = open_trackers(self._wandb, self._resolved, self.path)
        line = {**(texts or {}), **{key: _number(value) for key, value in numbers.items()}}
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        self.step = int(numbers["trainer/global_step"])
        with_table = self._wandb is not None and self.step % TABLE_STEPS == 0
        samples = table_rows(self._kept, self._model_folder) if with_table else []
        for tracker in self._trackers:
            tracker.log(self.step, numbers, samples)
        self._kept = []

    def cut_after(self, step: int) -> list[dict[str, Any]]:
        """Delete the lines of all optimizer steps after `step` from `metrics.jsonl` and `evaluations.jsonl`: the
        trainer will repeat these steps. Returns the remaining lines of `metrics.jsonl`."""
        self.step = step
        _cut(self.path / EVALUATIONS, "step", step)
        metrics, key = self.path / METRICS, "trainer/global_step"
        if any(line[key] > step for line in read_lines(metrics)):
            self.close()
        return _cut(metrics, key, step)

    def append_evaluations(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append a line to `evaluations.jsonl` for each set that was evaluated after an optimizer step."""
        with _append_lines(self.path / EVALUATIONS) as file:
            file.writelines(json.dumps({"step": step, **record}, allow_nan=False) + "\n" for record in records)

    def is_best(self, step: int, key: str) -> bool:
        """True if the evaluation after `step` has a higher score than every other evaluation of the run. `key`:
        `eval/<set>/<score>`."""
        name, _, score = key.removeprefix("eval/").rpartition("/")
        scores = {line["step"]: line[score] for line in read_lines(self.path / EVALUATIONS) if line["set"] == name}
        return step in scores and all(scores[step] > value for other, value in scores.items() if other != step)

    def append_trajectories(self, trajectories: Sequence[Mapping[str, Any]]) -> None:
        """Append each trajectory as a line to `trajectories.jsonl`, until the file has its maximum size."""
        self._kept += trajectories if self._wandb is not None else []
        if not trajectories:
            return
        with _append_lines(self.path / TRAJECTORIES) as file:
            for trajectory in trajectories:
                if file.tell() >= TRAJECTORIES_BYTES:
                    break
                file.write(json.dumps(trajectory, allow_nan=False, ensure_ascii=False) + "\n")

    def plot(self) -> None:
        """Draw `learning_curve.png` from the lines of `metrics.jsonl`."""
        lines = list(read_lines(self.path / METRICS))
        with atomic_file(self.path / "learning_curve.png") as partial:
            draw_learning_curve(lines, partial, title=self.path.name)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the result of the run as one JSON object. If a process resumes a run but ends before `begin`, the
        summary of the earlier process stays."""
        if not self._has_begun:
            return
        summary = {key: printable(value) if isinstance(value, str) else value for key, value in summary.items()}
        write_atomic(self.path / SUMMARY, json.dumps(summary, indent=2, default=str) + "\n")

    def close(self) -> None:
        """Close the open files and trackers."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []


def table_rows(records: Sequence[Mapping[str, Any]], model_folder: Path) -> list[dict[str, Any]]:
    """Convert records of `trajectories.jsonl` to rows of a tracker's table; texts are decoded by the tokenizer in
    `model_folder`."""
    rows = []
    for record in records[:TABLE_ROWS]:
        ids = [token for step in record["steps"] for token in (*step["prompt_ids"], *step["response_ids"])]
        text = str(_tokenizer(model_folder / TOKENIZER).decode(ids, skip_special_tokens=False))
        rows.append({key: record[key] for key in TABLE_KEYS} | {"text": text[-TABLE_CHARACTERS:]})
    return rows


def _cut(path: Path, key: str, limit: int) -> list[dict[str, Any]]:
    """Keep only the lines of a JSONL file in which `key` is at most `limit`. Returns these lines."""
    lines = list(read_lines(path))
    kept = [line for line in lines if line[key] <= limit]
    if len(kept) < len(lines):
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _number(value: float) -> float | int | None:
    """A number for JSON: NaN and infinities become null."""
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


def _append_lines(path: Path) -> TextIO:
    """Open a file of lines for appending. Cuts off an incomplete last line, which a killed writer left."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _end_of_last_line(file, size)
        if whole < size:
            file.truncate(whole)
    return path.open("a", encoding="utf-8")


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    """Position after the last line break among the first `size` bytes; 0 if there is none."""
    while size > 0:
        start = max(0, size - BLOCK)
        file.seek(start)
        if (found := file.read(size - start).rfind(b"\n")) >= 0:
            return start + found + 1
        size = start
    return 0
