"""One run: checks that the peers agree, and measures how fast each is; prints a table and writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.handoff.environment import FOLDER, is_here, run_there


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--json", type=Path, default=FOLDER / "figures.json", help="file for the figures")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each function; the median counts")
    arguments = parser.parse_args()
    if not is_here():
        return run_there(sys.argv[1:])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread each, so that CPU time is comparable with wall time
    from benchmarks.handoff.agreement import check
    from benchmarks.handoff.measure import figures, table

    print(f"{check()} random outputs: the same rows, mini-batches and advantages as SkyRL's")
    found = figures(arguments.repeats)
    print(table(found))
    arguments.json.write_text(json.dumps([asdict(figure) for figure in found], indent=2))
    print(f"\n{arguments.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
