"""The bound of every reward, whoever gives it: an environment, an agent, a scorer, or a message to the buffer."""

from __future__ import annotations

MAX_REWARD = 1e12
"""Largest magnitude of a reward, so that squares and sums of rewards stay finite in float32."""
NEEDED = f"a number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
"""The range of a reward, in words for error messages."""


def is_reward(number: float) -> bool:
    """Whether the magnitude of a reward is at most `MAX_REWARD`; False for NaN."""
    return abs(number) <= MAX_REWARD
