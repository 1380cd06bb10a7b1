"""Why trajectories end."""

from __future__ import annotations

from enum import StrEnum


class StopReason(StrEnum):
    """Why a trajectory ended."""

    STOP = "stop"
    """The environment said so."""
    LENGTH = "length"
    """The next prompt would exceed `max_input_length`."""
    MAX_TURNS = "max_turns"
    ABORT = "abort"
    """The engine gave the turn up."""
    ENGINE_TIMEOUT = "engine_timeout"
    ENGINE_OUTPUT = "engine_output"
    """What the engine answered contradicts itself or what it was asked."""
    ENVIRONMENT_ERROR = "environment_error"
    ENVIRONMENT_TIMEOUT = "environment_timeout"
    ENVIRONMENT_REWARD = "environment_reward"
    """The reward was not a finite number."""
    ENVIRONMENT_OUTPUT = "environment_output"
    """The messages were malformed or too large."""


FAILURES = frozenset(StopReason) - {StopReason.STOP, StopReason.LENGTH, StopReason.MAX_TURNS}
"""Reasons that say nothing about the policy: the attempt is lost, and the trajectory starts anew as its next one."""
