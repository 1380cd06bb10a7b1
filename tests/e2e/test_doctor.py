"""`baton doctor` measures every node of a real Ray cluster."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.driver.doctor import SECONDS
from tests.waiting import free_port

pytestmark = [pytest.mark.slow, pytest.mark.full]

NODES = 2


@pytest.fixture
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """Two nodes on this machine: the head's address, and the environment with the cluster's token."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    environment, address = {**os.environ, **token}, f"127.0.0.1:{free_port()}"
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    head = [*ray, "--head", f"--port={address.split(':')[1]}", "--include-dashboard=false"]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        for command in (head, *[[*ray, f"--address={address}"]] * (NODES - 1))
    ]
    yield address, environment
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        process.wait(60)


def doctor(address: str, environment: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service", "doctor", "--address", address, "--folder", str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_every_node_is_measured_within_the_deadline(cluster: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, environment = cluster
    deadline = time.monotonic() + 120
    while True:
        began = time.monotonic()
        said = doctor(address, environment, tmp_path)
        if f"{NODES} machines, " in said.stdout:
            break
        assert time.monotonic() < deadline, said.stdout + said.stderr
        time.sleep(1)  # the nodes start
    assert time.monotonic() - began < SECONDS
    faults = said.stdout.splitlines()[-1].partition(", ")[2]
    assert said.returncode == (faults != "0 faults")

    wrong = doctor(address, {**environment, "RAY_AUTH_TOKEN": secrets.token_hex(16)}, tmp_path)
    assert wrong.returncode == 2, wrong.stdout + wrong.stderr
    last = wrong.stderr.splitlines()[-1]  # Ray's own lines come before
    assert last.startswith(f"baton: --address {address}: ") and "RAY_AUTH_TOKEN" in last


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_in_one_line(address: str, tmp_path: Path) -> None:
    said = doctor(address, {**os.environ}, tmp_path)
    assert said.returncode == 2 and address in said.stderr.splitlines()[-1] and "Traceback" not in said.stderr
