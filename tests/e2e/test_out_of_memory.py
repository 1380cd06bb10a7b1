"""Lack of memory, of a host or of a rank's GPU: one line names it with what is done, or what to change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from service.run.liveness.host_memory import REMEDIES
from tests.e2e.conftest import QUICK, Drive
from tests.e2e.short_of_memory import FOLDER
from tests.e2e.verdict import judged

pytestmark = [pytest.mark.slow, pytest.mark.full]

ROOM = 2 << 30
"""Bytes more than are used now, from which on Ray ends a process; other processes may take some of them."""
RUN = """
import asyncio, sys
from functools import partial
from actors.deaths import Supervised, cause_of_death, is_death, life_of
import ray
from service.run.liveness.supervisor import Supervisor

class Growing(Supervised):
    async def grow(self):
        held = []
        while True:
            held.append(bytearray(b"x" * (64 << 20)))
            await asyncio.sleep(0.25)

async def main():
    lost = asyncio.Event()
    def say(line):
        print(line, flush=True)
        lost.set()
    grows = ray.remote(Growing).options(num_cpus=0, max_restarts=-1).remote()
    supervisor = Supervisor(say, cause_of_death, is_death)
    supervisor.watch("generator-0", partial(life_of, grows))
    grows.grow.remote()
    await asyncio.wait_for(lost.wait(), 120)
    supervisor.stop()

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
         _temp_dir=sys.argv[1])
asyncio.run(main())
"""


def test_an_actor_that_rays_memory_monitor_ends_is_named_with_its_size_and_what_to_change() -> None:
    memory = psutil.virtual_memory()
    if memory.available < 3 * ROOM:
        pytest.skip("too little memory is free to use some up")
    threshold = (memory.total - memory.available + ROOM) / memory.total
    monitor = {"RAY_memory_usage_threshold": f"{threshold:.4f}", "RAY_memory_monitor_refresh_ms": "100"}
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short, for sockets
        command = [sys.executable, "-c", RUN, folder]
        ran = subprocess.run(
            command, env={**os.environ, **monitor}, capture_output=True, text=True, timeout=300, check=False
        )
    assert ran.returncode == 0, ran.stderr
    (line,) = ran.stdout.splitlines()
    told = re.fullmatch(
        r"the process of generator-0 \(pid \d+\) was out of memory, at (\S+) GB: Ray ended it \(its host had \S+ of "
        r"\S+ in use\); (.*); Ray starts it again",
        line,
    )
    assert told is not None, line
    assert float(told[1]) > 0.2 and told[2].startswith(REMEDIES["generator"])


def test_a_step_without_memory_is_taken_again_with_more_checkpointing_and_nothing_is_lost_or_trained_twice(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step, in one after a checkpoint, and once more with all layers checkpointed."""
    (tmp_path / "lacks").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "lacks"))
    steps, every = 14, 4
    run = drive(
        [
            "algorithm.loss=tests.e2e.short_of_memory:short_of_memory",
            f"run.max_steps={steps}",
            "run.max_restarts=1",
            f"trainer.checkpoint_every={every}",
            *QUICK,
        ]
    )
    run.finish()
    lacked = [line.partition(" (")[2].strip() for line in run.said if "out of memory" in line]
    says = ": CUDA out of memory. Tried to allocate 2.00 GiB."
    step = r"\); the trainer restarts from step (\d+)"
    remedy = re.escape(f"; {REMEDIES['trainer']}, or use a host with more memory")
    patterns = [
        rf"rank 1 was out of memory, 0 of 2 layers kept their input only \(1 would take less\){says}{remedy}{step}",
        rf"rank 1 was out of memory, 1 of 2 layers kept their input only \(2 would take less\){says}{remedy}{step}",
        rf"rank 1 was out of memory, 2 of 2 layers kept their input only{says}{remedy}{step}",
    ]
    found = [re.fullmatch(pattern, line) for pattern, line in zip(patterns, lacked, strict=True)]
    assert all(found), lacked
    restarts = [int(match[1]) for match in found if match is not None]
    assert restarts[0] == 0 and restarts == sorted(restarts) and all(step % every == 0 for step in restarts)
    assert restarts[1] > 0
    judged(run.folder, steps)
