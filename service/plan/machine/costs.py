"""Costs of the parts of a run besides their models' operations; the numbers and their sources are in costs.toml."""

from __future__ import annotations

from pathlib import Path

import msgspec

_COSTS = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, dict[str, float]])
CPU, GPU, TRAINER, WEIGHTS = (_COSTS[of] for of in ("cpu", "gpu", "trainer", "weights"))
"""Seconds, bytes and bytes/s by name."""
