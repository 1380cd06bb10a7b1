"""One run: do the peers agree, and how fast is who; a table, and JSON beside it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.handoff.agreement import check
from benchmarks.handoff.measure import Figure, figures, table


def main() -> int:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each function; the median counts")
    arguments = parser.parse_args()
    print(f"{check()} random outputs: the same rows, mini-batches and advantages as SkyRL's")
    found: list[Figure] = figures(arguments.repeats)
    print(table(found))
    if arguments.json:
        arguments.json.write_text(json.dumps([figure.__dict__ for figure in found], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
