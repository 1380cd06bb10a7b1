"""Records a torch profile of a few optimizer steps of one rank, without interrupting training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfile:
    """Records a trace of the next optimizer steps; after the last of these steps, `file` is a Chrome trace compressed
    by gzip."""

    def __init__(self, steps: int, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._left = self._steps = steps
        self.file: bytes | None = None
        """The trace; None until all steps were recorded."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record the optimizer step that the block takes."""
        if self._left == self._steps:
            self._profile.start()
        try:
            yield
        finally:
            self._left -= 1
            if self._left == 0:
                self._profile.stop()
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "profile.json.gz"
                    self._profile.export_chrome_trace(str(file))
                    self.file = file.read_bytes()
