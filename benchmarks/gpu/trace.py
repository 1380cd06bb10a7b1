"""The longest gaps between kernels in a recorded step, each named by the kernels before and after it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from service.learn.learner import Learner
from service.learn.profile import StepProfile
from service.types import MiniBatch

KINDS = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
NAME_CHARACTERS = 80


class Gap(NamedTuple):
    """A time in which no kernel ran."""

    seconds: float
    after: str
    before: str


def recorded(learner: Learner, batch: MiniBatch) -> bytes:
    """One step as a Chrome trace, compressed by gzip."""
    profile = StepProfile(1, learner.policy.device)
    with profile.step():
        learner.step(batch)
        if learner.policy.device.type == "cuda":
            torch.cuda.synchronize()
    if profile.file is None:
        raise RuntimeError("the profiler recorded nothing")
    return profile.file


def kernels(file: bytes, device: str) -> list[tuple[float, float, str]]:
    """Start and end in seconds, and name, of everything that ran on the device."""
    events: Iterable[dict[str, Any]] = json.loads(gzip.decompress(file))["traceEvents"]
    ran = [event for event in events if event.get("ph") == "X" and event.get("cat") in KINDS[device]]
    return [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["name"][:NAME_CHARACTERS]) for e in ran]


def gaps(ran: Iterable[tuple[float, float, str]]) -> tuple[list[Gap], float]:
    """All gaps, the longest first, and their fraction of the time from the first kernel to the last."""
    found, latest, last, began = [], float("-inf"), "", float("inf")
    for start, end, name in sorted(ran):
        began = min(began, start)
        if last and start > latest:
            found.append(Gap(start - latest, last, name))
        if end >= latest:
            latest, last = end, name
    idle = sum(gap.seconds for gap in found)
    return sorted(found, reverse=True), idle / (latest - began) if found else 0.0
