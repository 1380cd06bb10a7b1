"""One run: checks that the peers agree, and measures how fast each is; prints a table and writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks import own_environment

HERE = Path(__file__).parent
FOLDER = own_environment.ROOT / "build" / "bench-handoff"


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--json", type=Path, default=FOLDER / "figures.json", help="file for the figures")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each function; the median counts")
    arguments = parser.parse_args()
    if Path(sys.prefix).resolve() != FOLDER.resolve():  # run it again where the peers are installed
        python = own_environment.own_python(FOLDER, HERE / "peers.txt", HERE / "requirements.txt")
        command = [str(python), "-m", "benchmarks.handoff", *sys.argv[1:]]
        return subprocess.run(command, cwd=own_environment.ROOT, check=False).returncode
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
