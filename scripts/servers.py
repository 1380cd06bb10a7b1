"""Install the servers and the browser that some tests need, if possible; the exit code is 0 either way.

Debian packages are installed with apt-get, as root, within a deadline; their services are not started. Tests whose
program is missing are skipped with the reason. With BATON_SERVERS=no nothing is installed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = {
    "prometheus": ("prometheus",),
    "prometheus-alertmanager": ("prometheus-alertmanager", "alertmanager"),
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "slurm-wlm": ("slurmctld",),
}
"""Names of the program that each Debian package installs; one of the names is enough."""

DEADLINE = 300.0
"""Seconds for all commands together."""

QUICK = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=10", "-o", "Acquire::https::Timeout=10")

POLICY = Path("/usr/sbin/policy-rc.d")
"""Debian calls this script to decide whether a service may be started when its package is installed."""


def main() -> int:
    """Install what is missing; always returns 0."""
    missing = absent()
    if not missing:
        return 0
    reason = forbidden() or install(missing)
    if still := absent():
        print(f"baton: without {', '.join(still)}, whose tests are skipped: {reason or 'no program came'}", flush=True)
    return 0


def absent() -> list[str]:
    """The packages whose program is not found."""
    return [package for package, names in PROGRAMS.items() if not any(map(shutil.which, names))]


def forbidden() -> str:
    """The reason why nothing can be installed on this machine, or an empty text."""
    if os.environ.get("BATON_SERVERS") == "no":
        return "BATON_SERVERS=no"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if os.geteuid() != 0:
        return "only root can install them: apt-get install " + " ".join(absent())
    return ""


def install(packages: Sequence[str]) -> str:
    """Install the packages; returns the reason for a failure, or an empty text."""
    print(f"baton: installing {', '.join(packages)} for the tests (at most {DEADLINE:.0f} s) ...", flush=True)
    end = time.monotonic() + DEADLINE
    reason = ""
    with services_stay_down(POLICY):
        for words in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            # After a failed update the existing package lists may still be sufficient.
            reason = apt(words, end - time.monotonic())
    return reason


@contextmanager
def services_stay_down(policy: Path) -> Iterator[None]:
    """Within this context no installed service is started, unless the machine has a policy already."""
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink()


def apt(words: Sequence[str], seconds: float) -> str:
    """Run apt-get, and kill its process group at the deadline; returns the reason for a failure, or an empty text."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["apt-get", "-q", *QUICK, *words],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"apt-get {words[0]} took too long"
        log.seek(0)
        said = [line.strip() for line in log if line.startswith(("E:", "Err"))]
    if process.returncode == 0:
        return ""
    return f"apt-get {words[0]} failed: {said[-1] if said else process.returncode}"


if __name__ == "__main__":
    sys.exit(main())
