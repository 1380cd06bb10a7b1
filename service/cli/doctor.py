"""The command `baton doctor`: checks the machines before a run."""

from __future__ import annotations

import argparse
from pathlib import Path

ABOUT = "Measure every node of a Ray cluster, or this machine, and say what is wrong and what to do, before a run."

EXAMPLES = """\
examples:
  baton doctor                                           # this machine
  baton doctor --address 10.0.0.1:6379                   # every node of a cluster (or RAY_ADDRESS)
  baton doctor --folder /shared/runs --store s3://bucket/runs

It looks at: the version of NVIDIA's driver and other work on the GPUs, InfiniBand, limits (open files, locked memory),
/dev/shm, the disk of the run folder (room, rate), clocks, ports, the object store, and versions of packages that differ
between nodes. It takes some seconds. The exit code is 1 if something is wrong.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--address", metavar="HOST:PORT", help="of the cluster's head (default: RAY_ADDRESS, or none)")
    parser.add_argument("--folder", metavar="PATH", type=Path, default=Path("runs"), help="where run folders will be")
    parser.add_argument("--store", metavar="URL", help="the object store of the run (run.store)")
