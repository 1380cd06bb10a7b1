"""The buffer under load: `python -m benchmarks.soak [--minutes 20]`.

The real buffer actor runs in a separate Ray. Producers claim groups and submit each as one step group of about 0.4 MB,
at a given rate. A consumer leases mini-batches, commits them and reports checkpoints that cover them, so that segments
of the journal are deleted. At the end the buffer is killed with -9 and restarts from its journal.

Printed: acknowledged step groups a second and how long each acknowledgement took, the buffer's resident memory against
its bound, the journal's bytes on the disk, the seconds of the restart, and missed targets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from actors.buffer.actor import BufferActor, LeasedBatch  # first: Ray reads the environment that `actors` sets
from actors.watchdog import MARK, start_watchdog
from benchmarks.own_environment import own_ray

# isort: split
import ray

from service.config import load_config
from service.handoff.steps.tables import step_group
from service.handoff.steps.wire import encode
from service.handoff.verbs import Assignment, Claim, Receipt
from service.rollout.prompts.rows import write_rows
from service.types import PolicyVersion, Sender, Step, TrajectoryEnd, TrajectoryId

VOCABULARY = 32_000
SAMPLES = 8
PROMPT, RESPONSE = 200, 2_700
"""Tokens of a trajectory's only turn; eight trajectories take about 0.4 MB."""
MINI_BATCH, CHECKPOINT_EVERY = 32, 5
MAX_BYTES = 512 << 20
ALLOWANCE = 1.1
"""Factor by which the resident memory may exceed its bound."""
PRODUCERS, RATE = 2, 160.0
"""Generators, and the step groups that they offer together in a second."""
WINDOW = 4
"""Maximum number of groups that a producer has in flight."""
LEAST_GROUPS_PER_SECOND = 150.0

SETTINGS = (
    "run.name=soak",
    "data.shuffle=false",
    "env.max_turns=1",
    "generator.max_input_length=512",
    f"generator.max_generate_length={RESPONSE}",
    "buffer.lookahead=8",
    f"buffer.max_staleness={1 << 20}",
    f"buffer.max_bytes={MAX_BYTES}",
    f"buffer.max_journal_bytes={4 << 30}",
    f"algorithm.n_samples_per_prompt={SAMPLES}",
    f"trainer.mini_batch_size={MINI_BATCH}",
    "trainer.ranks=1",
    "trainer.max_tokens_per_micro_batch=32768",
    f"trainer.checkpoint_every={CHECKPOINT_EVERY}",
    "metrics.port=0",
)


class Nobody:
    """Replaces the metrics hub."""

    def push(self, *told: Any) -> None:
        """Discard the metrics."""


class Producer:
    """A generator that needs no time to generate."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._buffer = ray.get_actor("buffer")
        self._serving = PolicyVersion(0, 0)
        self._stopped = False
        self._sequence = self._claims = 0
        rng = np.random.default_rng(0)
        self._prompt = rng.integers(0, VOCABULARY, PROMPT, dtype=np.int32)
        self._response = rng.integers(0, VOCABULARY, RESPONSE, dtype=np.int32)
        self.ack_seconds: list[float] = []

    def update(self, version: tuple[int, int]) -> None:
        """Set the version of the weights that are served from now on."""
        self._serving = PolicyVersion(*version)

    def stop(self) -> int:
        """Claim no more groups; returns how many were acknowledged so far."""
        self._stopped = True
        return len(self.ack_seconds)

    async def run(self, rate: float) -> list[float]:
        """Produce `rate` groups per second; returns the seconds of each acknowledgement."""
        incarnation = await self._buffer.join.remote("generator", self._name)
        free = asyncio.Semaphore(WINDOW)
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while not self._stopped:
                await free.acquire()
                due = max(due + 1 / rate, time.monotonic() - 1.0)
                await asyncio.sleep(max(due - time.monotonic(), 0.0))
                tasks.create_task(self._one(incarnation)).add_done_callback(lambda _: free.release())
        return self.ack_seconds

    async def _one(self, incarnation: int) -> None:
        self._claims += 1
        claim = Claim(self._name, incarnation, self._serving, self._claims)
        claimed = await self._buffer.claim.remote(claim, 2.0)
        if not isinstance(claimed, list):
            return
        (work,) = claimed
        data = self._message(work, incarnation)
        began = time.monotonic()
        receipt = await self._buffer.submit.remote(data)
        if not isinstance(receipt, Receipt) or receipt.duplicate:
            raise ValueError(f"not accepted: {receipt}")
        self.ack_seconds.append(time.monotonic() - began)

    def _message(self, work: Assignment, incarnation: int) -> bytes:
        self._sequence += 1
        of = [TrajectoryId(work.group_id, sample, work.attempts[0]) for sample in work.samples]
        step = Step(
            trajectory=of[0],
            prompt_uid=work.prompt_uid,
            index=0,
            prompt_ids=self._prompt,
            response_ids=self._response,
            logprobs=np.full(RESPONSE, -1.0, np.float32),
            loss_mask=np.ones(RESPONSE, np.bool_),
            versions=np.full(RESPONSE, self._serving.pack(), np.int64),
        )
        ends = [TrajectoryEnd(each, work.prompt_uid, 1, "stop", float(each.sample % 2)) for each in of]
        steps = [replace(step, trajectory=each) for each in of]
        return encode(step_group(Sender(self._name, incarnation, self._sequence), steps, ends))


class Consumer:
    """A trainer that needs no time to train."""

    def __init__(self) -> None:
        self._buffer = ray.get_actor("buffer")
        self._stopped = False

    def stop(self) -> None:
        """Lease no more mini-batches."""
        self._stopped = True

    async def run(self, producers: list[Any]) -> int:
        """Consume every mini-batch; returns how many there were."""
        incarnation = await self._buffer.join.remote("trainer", "trainer", 0)
        step = 0
        while not self._stopped:
            for producer in producers:
                producer.update.remote((incarnation, step))
            leased = await self._buffer.lease.remote(incarnation, 1.0)
            if isinstance(leased, LeasedBatch):
                step += 1
                await self._buffer.commit.remote(incarnation, leased.lease, PolicyVersion(incarnation, step))
                if step % CHECKPOINT_EVERY == 0:
                    await self._buffer.covered.remote(step, step)
        return step


async def soak(folder: Path, minutes: float) -> dict[str, Any]:
    """Load the buffer for this many minutes; returns the measurements."""
    write_rows(folder / "tasks.jsonl", [{"uid": f"p{row}", "prompt": "?"} for row in range(1000)])
    hub = ray.remote(Nobody).options(name="hub", num_cpus=0).remote()
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000, "max_restarts": -1, "max_task_retries": -1}
    paths = (str(folder / "tasks.jsonl"), str(folder / "journal"))
    words = (load_config([], SETTINGS).model_dump_json(), VOCABULARY, *paths, "hub")
    buffer = ray.remote(BufferActor).options(name="buffer", **options).remote(*words)
    await buffer.status.remote()
    process = buffer_process(os.environ[MARK])
    base = process.memory_info().rss
    light: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100}
    producers = [ray.remote(Producer).options(**light).remote(f"producer-{i}") for i in range(PRODUCERS)]
    consumer = ray.remote(Consumer).options(**light).remote()
    consuming = consumer.run.remote(producers)
    producing = [producer.run.remote(RATE / PRODUCERS) for producer in producers]
    began = time.monotonic()
    memory, disk = await watch(process, folder / "journal", minutes * 60)
    in_time = sum([await producer.stop.remote() for producer in producers])
    seconds = time.monotonic() - began
    answers = await asyncio.gather(*producing)
    await consumer.stop.remote()
    steps = await consuming
    status = await buffer.status.remote()
    acks = np.array([second for seconds_of_one in answers for second in seconds_of_one])
    killed = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    again = await buffer.status.remote()
    restart = time.monotonic() - killed
    del hub
    return {
        "minutes": seconds / 60,
        "groups_per_second": in_time / seconds,
        "p50_ms": 1000 * float(np.quantile(acks, 0.5)),
        "p99_ms": 1000 * float(np.quantile(acks, 0.99)),
        "optimizer_steps": steps,
        "rss_mb_at_least": min(memory) / 1e6,
        "rss_mb_at_most": max(memory) / 1e6,
        "rss_mb_bound": ALLOWANCE * (base + MAX_BYTES) / 1e6,
        "journal_written_mb": status["journal_position"] / 1e6,
        "journal_mb_at_most": max(disk) / 1e6,
        "restart_seconds": restart,
        "lost_over_the_restart": status["accepted_tokens"] - again["accepted_tokens"],
        "ledger_difference": again["accepted_tokens"] - sum(again["tokens"].values()),
    }


def buffer_process(mark: str) -> psutil.Process:
    """The buffer's process, by the mark of this run and its title."""
    for process in psutil.process_iter(["cmdline", "environ"]):
        info = process.info
        if "BufferActor" in " ".join(info["cmdline"] or []) and (info["environ"] or {}).get(MARK) == mark:
            return process
    raise RuntimeError("the run has no process of the buffer")


async def watch(process: psutil.Process, journal: Path, seconds: float) -> tuple[list[int], list[int]]:
    """The buffer's resident bytes and the bytes of its journal, each second."""
    memory, disk = [], []
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        await asyncio.sleep(min(1.0, seconds - passed))
        memory.append(process.memory_info().rss)
        disk.append(sum(file.stat().st_blocks * 512 for file in journal.glob("*.journal")))
    return memory, disk


def missed(found: dict[str, Any]) -> list[str]:
    """The bars that were not reached, in words."""
    most = {"p99_ms": 50.0, "rss_mb_at_most": found["rss_mb_bound"], "restart_seconds": 5.0}
    wrong = [f"{name} {found[name]:.1f} > {bar:.1f}" for name, bar in most.items() if found[name] > bar]
    if found["groups_per_second"] < LEAST_GROUPS_PER_SECOND:
        wrong.append(f"groups_per_second {found['groups_per_second']:.1f} < {LEAST_GROUPS_PER_SECOND:.1f}")
    if found["journal_written_mb"] <= found["journal_mb_at_most"]:
        wrong.append("no segment of the journal was reclaimed")
    if found["lost_over_the_restart"] or found["ledger_difference"]:
        wrong.append("tokens are missing")
    return wrong


def main() -> int:
    """Load the buffer, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        ray_folder = tempfile.mkdtemp(prefix="soak-ray-")
        os.environ[MARK] = mark = Path(name).name
        start_watchdog(mark, Path(ray_folder))
        with own_ray(ray_folder, **{MARK: mark}):
            found = asyncio.run(soak(Path(name), arguments.minutes))
    print(json.dumps({key: round(value, 3) for key, value in found.items()}, indent=2))
    for bar in missed(found):
        print(f"missed: {bar}")
    return 1 if missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
