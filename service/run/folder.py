"""What a run leaves behind: `runs/<name>/` with its configuration, metrics, curve, trajectories and summary.

config.yaml         resolved, defaults included
metrics.jsonl       one flat JSON object per optimizer step
tensorboard/        the same numbers
learning_curve.png  reward, staleness, padded length over the steps
trajectories.jsonl  a bounded sample of completed trajectories
evaluations.jsonl   one JSON object per evaluation and set
address.json        where the run's metrics service listens
summary.json        how it ended
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from service.config import Config, resolved_yaml
from service.errors import UserError
from service.files import held
from service.observe.plot import draw_learning_curve
from service.observe.trackers import Tracker, open_trackers

TRAJECTORIES_BYTES = 64 << 20
"""Where `trajectories.jsonl` stops growing."""


def new_run_folder(parent: Path, name: str) -> Path:
    """Makes `parent/name`, or `parent/name-2`, `-3`, ... where a run of that name has been before."""
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        for number in range(1, 10_000):
            folder = Path(parent) / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
                return folder.resolve()
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"run.dir: cannot make a run folder in {str(parent)!a:.100}: {reason}") from None
    raise UserError(f"run.dir: {parent} has thousands of runs named {name}; choose another run.name")


class RunFolder:
    """Writes the files of one run; whole files are replaced at once, lines are appended and flushed."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        (self.path / "logs").mkdir(parents=True, exist_ok=True)
        self._metrics: TextIO | None = None
        self._trackers: list[Tracker] = []
        self._config: Config | None = None
        self._trajectories_full = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one run.

        Raises:
            UserError: another process runs in it.
        """
        with held(self.path):
            yield

    def forget_end(self) -> None:
        """How the run ended before, and where it was served, are no longer true: it goes on."""
        for name in ("summary.json", "address.json"):
            (self.path / name).unlink(missing_ok=True)

    def write_config(self, config: Config) -> None:
        """Keep the resolved configuration; `baton run --config <it>` repeats the run."""
        self._config = config
        write_whole(self.path / "config.yaml", resolved_yaml(config))

    def write_address(self, url: str) -> None:
        """Where /metrics and /status are served while the run goes on."""
        write_whole(self.path / "address.json", json.dumps({"url": url}) + "\n")

    def log_step(self, numbers: Mapping[str, float]) -> None:
        """One line of `metrics.jsonl`, and one point per curve in TensorBoard and the other trackers.

        Raises:
            ValueError: `trainer/global_step` is missing.
        """
        if "trainer/global_step" not in numbers:
            raise ValueError("a line of metrics.jsonl needs trainer/global_step")
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
            self._trackers = open_trackers(self._config, self.path)
        line = {key: _number(value) for key, value in numbers.items()}
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()
        for tracker in self._trackers:
            tracker.log(int(numbers["trainer/global_step"]), numbers)

    def cut_after(self, step: int) -> list[dict[str, Any]]:
        """Drop the lines of steps after `step`, which a trainer that went back will take again; returns the others."""
        _cut(self.path / "evaluations.jsonl", "step", step)
        metrics, key = self.path / "metrics.jsonl", "trainer/global_step"
        if any(line[key] > step for line in read_lines(metrics)):
            self.close()
        return _cut(metrics, key, step)

    def append_evaluations(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """One line for each set that was evaluated after an optimizer step."""
        with (self.path / "evaluations.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **record}, allow_nan=False) + "\n" for record in records)

    def append_trajectories(self, trajectories: Sequence[Mapping[str, Any]]) -> int:
        """Append completed trajectories, a line each, until the file is full; returns how many were kept."""
        if self._trajectories_full or not trajectories:
            return 0
        kept = 0
        with (self.path / "trajectories.jsonl").open("a", encoding="utf-8") as file:
            for trajectory in trajectories:
                if file.tell() >= TRAJECTORIES_BYTES:
                    self._trajectories_full = True
                    break
                file.write(json.dumps(trajectory, allow_nan=False, ensure_ascii=False) + "\n")
                kept += 1
        return kept

    def plot(self) -> None:
        """Draw `learning_curve.png` from what was logged so far."""
        lines = list(read_lines(self.path / "metrics.jsonl"))
        partial = self.path / ".learning_curve.partial.png"
        draw_learning_curve(lines, partial, title=self.path.name)
        os.replace(partial, self.path / "learning_curve.png")

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """How the run ended, as one JSON object."""
        write_whole(self.path / "summary.json", json.dumps(summary, indent=2, default=str) + "\n")

    def close(self) -> None:
        """Close the open files; nothing that was logged is lost without it."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        for tracker in self._trackers:
            tracker.close()
        self._trackers = []


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file; a last line that is not complete (its writer was killed) is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for text in file:
            if not text.endswith("\n"):
                return
            yield json.loads(text)


def _cut(path: Path, key: str, most: int) -> list[dict[str, Any]]:
    """Keep the lines of a file whose `key` is at most `most`; returns them."""
    lines = list(read_lines(path))
    kept = [line for line in lines if line[key] <= most]
    if len(kept) < len(lines):
        write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _number(value: float) -> float | int | None:
    """JSON has no NaN; a number that is not finite becomes null."""
    if isinstance(value, bool | int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
