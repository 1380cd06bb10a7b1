"""Measures in a few seconds how fast this machine computes matrix products, copies and attention, and how fast it does
the work of a run's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from service.plan.machine.costs import CPU
from service.plan.machine.device import Device, profile
from service.plan.machine.pace import message_seconds

BUDGET_SECONDS = 3.0
"""Maximum seconds of each measurement, apart from its first round."""

COPIES, ROWS, CONTEXT = {"cpu": 1 << 24, "cuda": 1 << 30}, {"cpu": 768, "cuda": 8192}, {"cpu": 512, "cuda": 8192}
"""Sizes of the measured operations on a CPU and on a GPU: bytes of a copy, number of rows of a square matrix, and
tokens of a row of attention."""


def measured(cpu: bool = False) -> Device:
    """Measure the rates of this machine's first GPU. If there is no GPU, or `cpu` is set, measure one CPU core, because
    each process of a run uses one core."""
    found = pace()
    device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same as ranks and engines use on a CPU
    try:
        rows, context = ROWS[device.type], CONTEXT[device.type]
        matrix = torch.randn(rows, rows, device=device, dtype=dtype)
        bandwidth = _copied_bytes(device)
        heads = torch.randn(3, 1, 8, context, 64, device=device, dtype=dtype)
        forward, both = _attention(heads)
        flops = 2 * 8 * 64 * context * context
        return Device(
            name="cpu" if cpu else "measured",
            source=f"measured here: {_device_name(device)}; work of processes takes {found:.2f} times as long as where "
            "its constants were measured",
            memory=torch.cuda.get_device_properties(device).total_memory if is_gpu else psutil.virtual_memory().total,
            products=2 * rows**3 / fastest(lambda: matrix @ matrix, device),
            bandwidth=2 * bandwidth,  # each byte is read and written
            attention=flops / forward,
            attention_backward=2.5 * flops / max(both - forward, forward),
            **_links(device, bandwidth),
            cores=None if is_gpu else len(os.sched_getaffinity(0)),
            pace=found,
        )
    finally:
        torch.set_num_threads(threads)


def pace() -> float:
    """Factor by which the work of a run's processes takes longer on this machine than on the machine on which the costs
    in costs.toml were measured."""
    return message_seconds() / CPU["message"]


def fastest(work: Callable[[], Any], device: torch.device, rounds: int = 20) -> float:
    """Call `work` up to `rounds` times, and return the seconds of the fastest call; other programs may slow single
    calls down."""
    seconds = list[float]()
    until = time.perf_counter() + BUDGET_SECONDS
    while len(seconds) < rounds and (not seconds or time.perf_counter() < until):
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _attention(heads: Tensor) -> tuple[float, float]:
    """Seconds of causal attention: forward only, and forward and backward."""
    query, key, value = heads.unbind()

    def both() -> None:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]

    forward = fastest(lambda: scaled_dot_product_attention(query, key, value, is_causal=True), heads.device)
    return forward, fastest(both, heads.device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = f"{len(os.sched_getaffinity(0))} CPU cores"
    return cores if torch.cuda.is_available() else f"{cores} (PyTorch can use no GPU here; --gpu h100 plans for one)"


def _copied_bytes(device: torch.device) -> float:
    """Bytes per second that can be copied within the device's memory."""
    source, target = torch.ones(2, COPIES[device.type], device=device, dtype=torch.uint8).unbind()
    return COPIES[device.type] / fastest(lambda: target.copy_(source), device)


def _links(device: torch.device, copied: float) -> dict[str, float]:
    """Rates of the links: a GPU's link to the host is measured, links between GPUs are an H100's; on a CPU all links
    have the rate of copies in memory."""
    if device.type == "cpu":
        return {"link": copied, "network": copied, "host_link": copied}
    host = torch.empty(COPIES["cuda"], dtype=torch.uint8, pin_memory=True)
    block, like = torch.empty(COPIES["cuda"], device=device, dtype=torch.uint8), profile("h100")
    to_host = COPIES["cuda"] / fastest(lambda: host.copy_(block), device)
    return {"link": like.link, "network": like.network, "host_link": to_host}
