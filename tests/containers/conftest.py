"""Real containers of podman, with a store of their own: an image of busybox, and what is left afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.rollout.chat.chat import Chat
from tests.conftest import wait_until_gone
from tests.containers.tasks import BASE
from tests.pure.rollout.test_special_tokens import THINKING_AND_JSON, tokenizer_of

CONTAINERS = """[containers]
default_ulimits = ["nofile=1024:{nofile}", "nproc=1000:1000"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
LEFT_SECONDS = 120.0
"""In which what a run or a server left has to be removed."""
BASE_FILES = Path(__file__).parents[2] / "build" / "containers" / "base.tar"
APPLETS = (
    *("sh", "sleep", "wget", "grep", "cat", "sed", "echo", "env", "ls", "nc", "dd"),
    *("mkdir", "touch", "tar", "chmod", "chown", "rm", "true", "["),
)


def podman(*words: str) -> str:
    """What podman prints."""
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture(scope="session")
def bytes_chat() -> Chat:
    return Chat(tokenizer_of(THINKING_AND_JSON))


@pytest.fixture(scope="session")
def busybox() -> Iterator[str]:
    """An image of busybox in a store of its own."""
    if missing := [name for name in ("podman", "runc", "nsenter", "busybox") if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install podman runc util-linux busybox-static")
    if os.geteuid() != 0:
        pytest.skip("needs root")
    folder = Path(tempfile.mkdtemp(prefix="podman-"))  # what stays mounted in pytest's folders fails other runs
    nofile = subprocess.run(["sh", "-c", "ulimit -Hn"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "containers.conf").write_text(CONTAINERS.format(nofile=nofile))
    store = f'[storage]\ndriver = "{{}}"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/graph"\n'
    (folder / "storage.conf").write_text(store.format("overlay"))
    asked = {**os.environ, "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf")}
    if subprocess.run(["podman", "info"], env=asked, capture_output=True, timeout=120).returncode:
        (folder / "storage.conf").write_text(store.format("vfs"))  # it copies every layer
    root = folder / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(str(shutil.which("busybox")), root / "bin")
    for applet in APPLETS:
        (root / "bin" / applet).symlink_to("busybox")
    (root / "work").mkdir()  # an overlay's root has the mode 555, and the containers' root has no power over modes
    (root / "etc").mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/:/bin/sh\n")
    (root / "bin" / "bash").write_text('#!/bin/sh\nexec /bin/sh "$@"\n')  # Harbor runs commands with bash
    (root / "bin" / "bash").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
        subprocess.run(
            ["sh", "-c", f"tar -C {root} -c . | podman import --change WORKDIR=/work - localhost/busybox:1"], check=True
        )
        yield "localhost/busybox:1"
        assert wait_until_gone("CONTAINERS_CONF", str(folder / "containers.conf"), LEFT_SECONDS) == {}
        podman("rmi", "--all", "--force")
    subprocess.run(["umount", folder / "graph" / "overlay"], capture_output=True, timeout=60)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def base_image(busybox: str) -> str:
    """An image of Debian with the programs of the tasks; its files are made once and kept in build."""
    if not BASE_FILES.exists():
        if shutil.which("debootstrap") is None:
            pytest.skip("needs debootstrap: apt-get install debootstrap")
        BASE_FILES.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as root:
            packages = "--include=git,sqlite3,python3-minimal,tmux"
            command = ["debootstrap", "--variant=minbase", packages, "bookworm", root]
            if subprocess.run(command, stdout=subprocess.DEVNULL, timeout=900).returncode:
                pytest.skip("debootstrap cannot make an image")
            parts = [
                f"--exclude=./{part}" for part in ("var/cache", "var/lib/apt", "usr/share/doc", "usr/share/locale")
            ]
            partial = BASE_FILES.with_suffix(".partial")
            subprocess.run(["tar", "-C", root, *parts, "-cf", partial, "."], check=True)
            partial.rename(BASE_FILES)
    podman("import", str(BASE_FILES), BASE)
    return BASE


@pytest.fixture
def nothing_left(busybox: str) -> Iterator[None]:
    """Checks that a test leaves no container, network or volume."""
    before = podman("network", "ls", "-q")
    yield
    assert (podman("ps", "-aq"), podman("volume", "ls", "-q"), podman("network", "ls", "-q")) == ("", "", before)
