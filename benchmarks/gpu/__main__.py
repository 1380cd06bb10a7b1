"""Measures what only a GPU can show, within 35 minutes, the most valuable figures first, without the network.

    python -m benchmarks.gpu                              all parts in 35 minutes; build/gpu.json and build/gpu.md
    python -m benchmarks.gpu --minutes 12                 the most valuable parts that fit
    python -m benchmarks.gpu --part learner --json FILE   one part (may be given several times)
    python -m benchmarks.gpu --device cpu                 a rehearsal with small shapes

Each figure has the range that is estimated for an H100, and a verdict. A part without its packages is not run, and
without a GPU none is. A part that crashes or hangs does not affect the other parts; the reason is in the JSON. Exit
code: 0 if every part was measured or not run, 1 if a part or a test failed, 2 for wrong input and without a usable GPU,
130 if it was stopped.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu.figures import markdown
from benchmarks.gpu.parts import PARTS, ROOT, Part, outcome, run_part

MINUTES = 35.0
REHEARSAL = 5.0
"""Factor by which deadlines on a CPU are longer than on a GPU: CPUs are slow, and may have other load."""
PACKAGES = ("torch", "triton", "vllm", "ray", "transformers", "flash-attn-4")


def main() -> int:
    """Run the parts, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="only this part")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="parts of the least value are left out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small shapes, as a rehearsal")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json")
    options = parser.parse_args()
    if not options.minutes > 0:
        parser.error(f"argument --minutes: {options.minutes} is no number of minutes above 0")
    if options.json.suffix != ".json" or options.json.is_dir():  # the table and a folder of logs are written beside it
        print(f"benchmarks.gpu: --json {options.json} is no file name that ends in .json; give one", file=sys.stderr)
        return 2
    why, machine = _machine(options.device)
    wanted = [part for part in PARTS if not options.part or part.name in options.part]
    if why:
        print(*(f"{part.name}: not run: {why}" for part in wanted), sep="\n")
        print(f"benchmarks.gpu: {why}; --device cpu rehearses the parts with small shapes", file=sys.stderr)
        return 2
    file = options.json.resolve()
    document: dict[str, Any] = {"machine": machine, "seconds": 0.0, "parts": []}
    try:
        file.with_suffix("").mkdir(parents=True, exist_ok=True)
        _write(file, document)
    except OSError as error:
        print(f"benchmarks.gpu: --json {options.json} cannot be written ({error})", file=sys.stderr)
        return 2
    slower = REHEARSAL if options.device == "cpu" else 1.0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the processes of the part would go on
    try:
        _run([part._replace(seconds=slower * part.seconds) for part in wanted], options, slower, file, document)
    except KeyboardInterrupt:
        print(f"benchmarks.gpu: stopped; {file} has the parts that had ended", file=sys.stderr)
        return 130
    print(markdown(document))
    print(f"written: {file} and {file.with_suffix('.md')}")
    figures = [figure for result in document["parts"] for figure in result["figures"]]
    failed = "failed" in [*(r["state"] for r in document["parts"]), *(f.get("verdict") for f in figures)]
    return 1 if failed else 0


def _run(parts: list[Part], options: argparse.Namespace, slower: float, file: Path, document: dict[str, Any]) -> None:
    """Run the parts that fit into the minutes; the files are complete after each part."""
    logs, started = file.with_suffix(""), time.monotonic()
    for part in parts:
        left = 60 * slower * options.minutes - (time.monotonic() - started)
        if part.longest <= left:
            print(f"{part.name}: at most {part.seconds:g} s; what it prints is in {logs / part.name}.log", flush=True)
            result = run_part(part, options.device, logs)
        else:
            reason = f"{left / 60:.0f} of {options.minutes:g} minutes were left, and parts of more value came first"
            result = outcome(part, "not run", reason)
        print(f"{result['part']}: {result['state']} {result['reason']}", flush=True)
        document["parts"].append(result)
        document["seconds"] = round(time.monotonic() - started, 1)
        _write(file, document)


def _write(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")
    file.with_suffix(".md").write_text(markdown(document))


def _machine(device: str) -> tuple[str, dict[str, str | float]]:
    """Return the reason why the device cannot be used, or "", and a description of this machine."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        return f"torch cannot be imported ({error})", {}
    packages = {name: metadata.version(name) for name in PACKAGES if [*metadata.distributions(name=name)]}
    machine: dict[str, str | float] = {"device": device, "python": platform.python_version(), **packages}
    if git := shutil.which("git"):
        found = subprocess.run([git, "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        machine |= {"commit": commit} if (commit := found.stdout.strip()) else {}
    if device == "cuda":
        if not torch.cuda.is_available():
            return "torch finds no CUDA GPU", machine
        gpu = torch.cuda.get_device_properties(0)
        machine |= {"gpu": gpu.name, "gpus": torch.cuda.device_count(), "gpu_gib": gpu.total_memory / 2**30}
    return "", machine


if __name__ == "__main__":
    sys.exit(main())
