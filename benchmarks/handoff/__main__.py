"""One run: checks that the peers agree, and measures how fast each is; prints a table.

With --to-ranks instead the seconds in which a mini-batch gets from the buffer's process to two ranks, on a Ray of its
own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import own_environment

HERE = Path(__file__).parent
FOLDER = own_environment.ROOT / "build" / "bench-handoff"
PART_BYTES = 200_000_000
"""Bytes of each of the two parts of a mini-batch."""


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="runs of each function; the median counts")
    parser.add_argument("--to-ranks", action="store_true", help="only from the buffer to two ranks")
    arguments = parser.parse_args()
    if arguments.to_ranks:
        seconds = to_ranks(arguments.repeats)
        print(f"from buffer to ranks: {seconds:.2f} s per GB (the fastest of {arguments.repeats})")
        return 0
    if Path(sys.prefix).resolve() != FOLDER.resolve():  # run it again where the peers are installed
        python = own_environment.own_python(FOLDER, HERE / "peers.txt", HERE / "requirements.txt")
        command = [str(python), "-m", "benchmarks.handoff", *sys.argv[1:]]
        return subprocess.run(command, cwd=own_environment.ROOT, check=False).returncode
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread each, so that CPU time is comparable with wall time
    from benchmarks.handoff.agreement import check
    from benchmarks.handoff.measure import figures, table

    print(f"{check()} random outputs: the same rows, mini-batches and advantages as SkyRL's")
    print(table(figures(arguments.repeats)))
    return 0


def to_ranks(repeats: int) -> float:
    """Least seconds per GB from the buffer's answer to a lease until both ranks have read their parts."""
    os.environ["RAY_AUTH_MODE"] = "disabled"  # Ray reads it when it is imported
    import numpy as np
    import ray

    from actors.buffer.actor import LeasedBatch
    from actors.trainer.group import TrainerGroup
    from service.config import Config
    from service.learn.learner import StepReport

    class Leasing:
        def __init__(self) -> None:
            self._parts = tuple(np.ones(PART_BYTES, np.uint8) for _ in range(2))

        def lease(self) -> Any:
            return LeasedBatch(1, {}, self._parts, [], [])

    class Rank:
        def step(self, batch: Any) -> Any:
            return StepReport(True, None, {"bytes": float(batch[::4096].sum())})

    async def timed(buffer: Any, group: TrainerGroup) -> float:
        began = time.perf_counter()
        await group.step((await buffer.lease.remote()).parts)
        return time.perf_counter() - began

    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        own_environment.own_ray(folder, num_cpus=2),
    ):
        buffer = ray.remote(num_cpus=0)(Leasing).remote()
        group = TrainerGroup(Config(), [ray.remote(num_cpus=0)(Rank).remote() for _ in range(2)])
        seconds = [asyncio.run(timed(buffer, group)) for _ in range(repeats)]
    return min(seconds) / (2 * PART_BYTES / 1e9)


if __name__ == "__main__":
    sys.exit(main())
