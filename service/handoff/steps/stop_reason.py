"""The reasons why trajectories end. The stop reason of a *step* comes from the engine instead: there `length` means
that the response was cut at the length limit."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """The last response was cut at `max_generate_length`; after it the environment or `max_turns` ended the episode."""
    LENGTH = "length"
    """The next prompt would exceed `max_input_length`."""
    MAX_TURNS = "max_turns"
    ABORT = "abort"
    """The engine aborted the request."""
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_OUTPUT = "engine_output"
    """The engine's answer contradicts itself or the request."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENVIRONMENT_REWARD = "environment_reward"
    """The reward was not a number, or its magnitude exceeded `MAX_REWARD`."""
    ENVIRONMENT_OUTPUT = "environment_output"
    """The environment's messages were malformed or too large."""


OVER_LONG = frozenset({StopReason.LENGTH, StopReason.TRUNCATED})
"""Reasons with which a trajectory ends at a length limit."""
FAILURES = frozenset(StopReason) - OVER_LONG - {StopReason.STOP, StopReason.MAX_TURNS}
"""Reasons that the policy did not cause. The attempt is discarded, and the trajectory starts again."""
