"""The progress lines of a run."""

from __future__ import annotations

EVERY = 10
"""Steps between two lines, after the first steps."""


def report(side: str, step: int, cpu: float, reward: float) -> None:
    """Print a line about each of the first steps and every tenth: the CPU seconds so far, and the mean reward."""
    if step < EVERY or step % EVERY == 0:
        print(f"{side}: step {step}, {cpu:.0f} CPU seconds so far, reward {reward:.2f}", flush=True)
