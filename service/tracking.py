"""Where the numbers of a step go besides `metrics.jsonl`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Scalars in TensorBoard's event files, written without torch."""

    def __init__(self, folder: Path) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=5)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """One point per curve; a number that is not finite is left out."""
        values = [
            Summary.Value(tag=key, simple_value=float(value)) for key, value in numbers.items() if math.isfinite(value)
        ]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is queued and end the writer's thread."""
        self._writer.close()
