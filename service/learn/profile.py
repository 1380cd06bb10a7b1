"""Records a torch profile of a few optimizer steps of one rank, without interrupting training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class StepProfile:
    """Records optimizer steps number `first` and later; after the last of these steps, `file` is a Chrome trace
    compressed by gzip."""

    def __init__(self, steps: int, device: torch.device, first: int = 1) -> None:
        """`steps`: number of steps to record; `first`: number of the first of them among the calls of `step`."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._first, self._last, self._taken = first, first + steps - 1, 0
        self.file: bytes | None = None
        """The trace; None until all steps were recorded."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the optimizer step that the block takes, and record it if it is one of the steps to record."""
        self._taken += 1
        if self._taken == self._first <= self._last:
            self._profile.start()
        try:
            yield
        finally:
            if self._first <= self._taken == self._last:
                self._profile.stop()
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder) / "profile.json.gz"
                    self._profile.export_chrome_trace(str(file))
                    self.file = file.read_bytes()
