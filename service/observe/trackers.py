"""Where the numbers of a step go besides `metrics.jsonl`."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from service.config import Config, WandbConfig
from service.errors import UserError


class Tracker(Protocol):
    """Somewhere that shows a run's numbers."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One optimizer step."""

    def close(self) -> None:
        """Write what is queued."""


def open_trackers(config: Config | None, folder: Path) -> list[Tracker]:
    """TensorBoard, and what the configuration asks for besides."""
    trackers: list[Tracker] = [TensorBoard(folder / "tensorboard")]
    if config is not None and config.metrics.wandb is not None:
        trackers.append(Wandb(config.metrics.wandb, config, folder))
    return trackers


class TensorBoard:
    """Scalars in TensorBoard's event files, written without torch."""

    def __init__(self, folder: Path) -> None:
        # Imported here: those who only read a run folder need not wait a second for it.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point per curve; a number that is not finite is left out."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=float(value)) for key, value in numbers.items() if math.isfinite(value)
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is queued and end the writer's thread."""
        self._writer.close()


def _wandb_id(folder: Path) -> str:
    """What wandb knows a run by, kept in its folder: a run of that name elsewhere is another one."""
    file = folder / "wandb" / "id"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{folder.name}-{secrets.token_hex(4)}")
    return file.read_text()


class Wandb:
    """Weights & Biases; a resumed run goes on as the same one.

    Raises:
        UserError: it does not let this run in, such as for want of a key.
    """

    def __init__(self, settings: WandbConfig, config: Config, folder: Path) -> None:
        # Imported here: it is optional, and few runs use it.
        import wandb

        try:
            self._run: Any = wandb.init(
                project=settings.project,
                name=folder.name,
                id=_wandb_id(folder),
                resume="allow",
                dir=str(folder),
                mode="offline" if settings.offline else "online",
                config=config.model_dump(mode="json"),
            )
        except wandb.errors.Error as error:
            reason = str(error).strip().partition("\n")[0]
            raise UserError(
                f"metrics.wandb: {reason} (or keep it in the run folder: metrics.wandb.offline=true)"
            ) from None
        # A trainer that goes back takes steps again, which wandb's own counter does not allow.
        self._run.define_metric("*", step_metric="trainer/global_step")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point per curve."""
        self._run.log(dict(numbers))

    def close(self) -> None:
        """Finish the run and write what is queued."""
        self._run.finish()
