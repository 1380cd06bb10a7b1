"""Sends the metrics of each optimizer step, which `metrics.jsonl` has, to trackers: TensorBoard, Weights & Biases."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from service.config import WandbConfig
from service.errors import UserError

_WRITERS = itertools.count()
"""Numbers the event files of this process. (After a rollback, a run begins a new file.)"""
Samples = Sequence[Mapping[str, Any]]
"""Rows of a table of trajectories; all have the same keys."""


def open_trackers(wandb: WandbConfig | None, resolved: str, folder: Path) -> list[TensorBoard | Wandb]:
    """TensorBoard, and Weights & Biases if `wandb` is set; `resolved`: the run's configuration as YAML."""
    trackers: list[TensorBoard | Wandb] = [TensorBoard(folder / "tensorboard")]
    if wandb is not None:
        trackers.append(Wandb(wandb, resolved, folder))
    return trackers


class TensorBoard:
    """Writes metrics as scalars to TensorBoard's event files, without torch.

    It does not use TensorBoard's writer, whose thread ends with a traceback if the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        # Imported here, because the import takes a second, and commands that only read a run folder do not need it.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}.{next(_WRITERS)}"
        self._records = RecordWriter((folder / name).open("ab"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples = ()) -> None:
        """Add one point per curve; values that are not finite, and samples, are left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=float(value)) for key, value in metrics.items() if math.isfinite(value)
        ]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        self._records.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _wandb_id(folder: Path) -> str:
    """The run's id in wandb, kept in the run folder. So two runs of the same name have different ids."""
    file = folder / "wandb" / "id"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{folder.name}-{secrets.token_hex(4)}")
    return file.read_text()


def _has_key() -> bool:
    """Whether a key for Weights & Biases is in the environment, or in the file in which `wandb login` keeps it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, NetrcParseError):
        return False


class Wandb:
    """Sends metrics to Weights & Biases. A resumed run continues its run there, under the same id.

    Raises:
        UserError: wandb refuses the run, for example without an API key.
    """

    def __init__(self, settings: WandbConfig, resolved: str, folder: Path) -> None:
        # Imported here: the package is optional.
        import wandb

        self._table: Any = wandb.Table
        try:
            self._run: Any = wandb.init(
                project=settings.project,
                name=folder.name,
                id=_wandb_id(folder),
                resume="allow",
                dir=str(folder),
                mode=None if os.environ.get("WANDB_MODE") or _has_key() else "offline",
                config=yaml.safe_load(resolved),
            )
        except wandb.errors.Error as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(f"metrics.wandb: {reason} (or keep it in the run folder: WANDB_MODE=offline)") from None
        # A trainer that goes back to a checkpoint repeats steps, which wandb's own step counter does not allow.
        self._run.define_metric("*", step_metric="trainer/global_step")

    def log(self, step: int, metrics: Mapping[str, float], samples: Samples = ()) -> None:
        """Add one point to the curve of each metric, and a table of sample trajectories if there are any."""
        line: dict[str, Any] = dict(metrics)
        if samples:
            line["trajectories"] = self._table(columns=list(samples[0]), data=[[*row.values()] for row in samples])
        self._run.log(line)

    def close(self) -> None:
        """Write the queued points and finish the run."""
        self._run.finish()
