"""Weights from a policy in another process into a real engine, by each transport; Ray's part is left out.

memory   gather to the CPU   | buckets with checksums into a node's image | pause, load, resume
ipc      gather on the GPU, handles                                       | pause, load, resume
nccl     needs two GPUs: a short run of the quick start with a larger model
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from actors.engine.vllm_engine import VllmEngine
from actors.weights.cuda_ipc import encode_handles
from actors.weights.delta import bucket_of
from actors.weights.image import Image
from actors.weights.part import PartCopy, WeightPart
from actors.weights.policy_tensors import checksum_of
from benchmarks.gpu.parts import Figures, Give
from benchmarks.gpu.quickstart import steps_of_run
from benchmarks.gpu.small_engine import SMALL, serving, settings, write_model
from service.config.tree import Config, MakeModelConfig
from service.learn.model.policy import Policy
from service.learn.settings import LearnSettings
from service.types import PolicyVersion

SHAPES = {
    "cuda": MakeModelConfig(
        hidden_size=2048, intermediate_size=8192, num_layers=12, num_heads=16, num_kv_heads=8, head_dim=128
    ),
    "cpu": SMALL,
}
UPDATES = {"cuda": 5, "cpu": 2}
ANSWER_SECONDS = 100.0
END = -1
"""In place of a step's number: no more weights are asked for."""
NCCL_MODEL = (
    "{hidden_size: 2048, intermediate_size: 8192, num_layers: 12, num_heads: 16, num_kv_heads: 8, head_dim: 128}"
)


def measure(device: str, give: Give) -> None:
    """`memory`, then what the GPUs allow."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder), SHAPES[device])
        config = settings("bfloat16")
        give(asyncio.run(_updates("memory", config, model, device)))
        ipc = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": "ipc"})})
        if device == "cuda":
            give(asyncio.run(_updates("ipc", ipc, model, device)))
        else:
            give({"transport": "ipc", "not_measured": "needs a CUDA GPU"})
    if torch.cuda.device_count() < 2:
        return give({"transport": "nccl", "not_measured": "needs two CUDA GPUs"})
    settings_of_run = ["run.max_steps=5", "weights.transport=nccl", "model.warm_start=null", f"model.make={NCCL_MODEL}"]
    seconds = [step["timing/sync_weights"] for step in steps_of_run([*settings_of_run, "model.dtype=bfloat16"])[1:]]
    return give({"transport": "nccl", "whole_s": statistics.median(seconds)})


async def _updates(transport: str, config: Config, model: Path, device: str) -> Figures:
    """Medians over some updates of one engine."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    async with serving(config, model) as engine:
        # After the engine, which takes memory that others use meanwhile for its own.
        sender = context.Process(target=_send, args=(theirs, transport, config.model_dump_json(), model, device))
        sender.start()
        try:
            found = [await _update(transport, engine, ours, step) for step in range(1, UPDATES[device] + 1)]
        finally:
            with contextlib.suppress(BrokenPipeError):  # it has failed, and its error is in the log
                ours.send(END)  # that this end is closed tells nothing: vLLM's process may have a copy of it
            sender.join(ANSWER_SECONDS)
    names = ("trainer_s", "pause_s", "whole_s")
    medians = {name: statistics.median(figures[name] for figures in found) for name in names}
    gigabytes = found[0]["gigabytes"]
    return {"transport": transport, "gigabytes": gigabytes, **medians, "gb_s": gigabytes / medians["whole_s"]}


async def _update(transport: str, engine: VllmEngine, connection: Connection, step: int) -> dict[str, float]:
    started = time.monotonic()
    connection.send(step)
    if not await asyncio.to_thread(connection.poll, ANSWER_SECONDS):
        raise TimeoutError(f"no weights by {transport} for {ANSWER_SECONDS:g} s")
    trainer_seconds = connection.recv()
    data = np.frombuffer(connection.recv_bytes(), np.uint8)
    image = Image([WeightPart.of_spans([(0, len(data))])])
    if transport == "memory":
        await asyncio.to_thread(image.write, bucket_of(step, 0, 0, data), data)
    given = image.path if transport == "memory" else data
    update = await engine.update_weights(PolicyVersion(1, step), given, checksum_of(data))
    image.close()
    return {
        "gigabytes": update.bytes / 1e9,
        "trainer_s": trainer_seconds,
        "pause_s": update.pause_seconds,
        "whole_s": time.monotonic() - started,
    }


def _send(connection: Connection, transport: str, config_json: str, model: Path, device: str) -> None:
    """In the trainer's process: what a rank publishes, each time that a step number comes."""
    policy = Policy(LearnSettings.of(Config.model_validate_json(config_json)), model, torch.device(device), 0, 1)
    while connection.recv() != END:
        started = time.monotonic()
        if transport == "ipc":
            data = encode_handles(policy.weights(everywhere=True) or {}, policy.device)
        else:
            publication = PartCopy(0, policy.shards())
            _, data = publication.bucket(0, publication.part.n_bytes, whole=True)
        connection.send(time.monotonic() - started)
        connection.send_bytes(data)
