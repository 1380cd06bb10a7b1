"""Runs one part in this process and appends its figures to a file:
`python -m benchmarks.gpu.one MODULE DEVICE FILE`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from benchmarks.gpu.figures import Figures
from benchmarks.gpu.parts import Skipped


def main() -> int:
    """Measure; an error ends the process with a traceback, whose last line becomes the reason of the failure."""
    module, device, file = sys.argv[1:]

    def give(figures: Figures | dict[str, str]) -> None:
        if device == "cpu" and "low" in figures:  # ranges are those of an H100
            figures = figures | {"verdict": "rehearsed"}
        print(
            *(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items())
        )
        with Path(file).open("a") as lines:
            lines.write(json.dumps(figures) + "\n")

    try:
        importlib.import_module(module).measure(device, give)
    except Skipped as skipped:
        give({"skipped": str(skipped)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
