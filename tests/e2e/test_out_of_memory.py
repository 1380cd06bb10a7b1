"""Lack of memory, of a host or of a rank's GPU: one line names it with what is done, or what to change."""

import re
import sys
import tempfile

import psutil
import pytest

from service.run.liveness.host_memory import REMEDIES
from tests.waiting import ran

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
        done = ran(sys.executable, "-c", RUN, folder, seconds=300, **monitor)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    told = re.fullmatch(
        r"the process of generator-0 \(pid \d+\) was out of memory, at (\S+) GB: Ray ended it \(its host had \S+ of "
        r"\S+ in use\); (.*); Ray starts it again",
        line,
    )
    assert told is not None, line
    assert float(told[1]) > 0.2 and told[2].startswith(REMEDIES["generator"])
