"""The hosts that the tests run on are apart from each other and from this machine, and nothing of them is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.hosts.bed import ROOT, Bed, Host
from tests.waiting import until

Lay = Callable[[Sequence[Host]], Bed]

REACH = """
import errno, socket, sys
with socket.socket() as there:
    there.settimeout(1)
    sys.exit(there.connect_ex((sys.argv[1], 9)) != errno.ECONNREFUSED)
"""


def reaches(bed: Bed, name: str, other: str) -> bool:
    """Whether a host gets an answer of another one, which is that nobody listens."""
    return bed.popen(name, [sys.executable, "-ISc", REACH, other]).wait(30) == 0


def test_hosts_share_one_folder_and_the_network_and_nothing_else(lay: Lay, tmp_path: Path) -> None:
    bed = lay([Host("a"), Host("b"), Host("c", writes=False)])
    for name in ("a", "b"):
        bed.call(name, f'test "$(hostname)" = {name}; touch /tmp/own /dev/shm/own {tmp_path}/of-{name}')
        bed.call(name, "test $(ls /proc | grep -c '^[0-9]') -lt 6; rm /tmp/own /dev/shm/own")
    bed.call("c", f"test -e {tmp_path}/of-b; test ! -e /tmp/own; ! touch {tmp_path}/of-c 2>/dev/null")
    assert {path.name for path in tmp_path.iterdir()} == {"of-a", "of-b"}
    assert reaches(bed, "a", "b") and not reaches(bed, "a", "192.0.2.1")
    uptime = [bed.popen(name, ["cat", "/proc/uptime"], {"stdout": subprocess.PIPE}).communicate()[0] for name in "ab"]
    first, second = (float(text.split()[0]) for text in uptime)
    assert second - first > 86400, "monotonic clocks of hosts say different times"


def test_a_link_is_cut_and_mended_and_a_host_that_was_killed_comes_back_empty(lay: Lay) -> None:
    bed = lay([Host("a"), Host("b")])
    bed.cut("b")
    assert not reaches(bed, "a", "b")
    bed.join("b")
    until(lambda: reaches(bed, "a", "b"), 30)
    bed.limit("b", mbit=100)
    bed.call("b", "touch /tmp/own")
    sleeper = bed.popen("b", ["sleep", "1000"])
    bed.kill("b")
    assert sleeper.wait(30) != 0
    bed.boot("b")
    until(lambda: reaches(bed, "a", "b"), 30)
    bed.call("b", "test ! -e /tmp/own")


OWNER = """
import sys
from pathlib import Path
from tests.hosts.bed import Bed, Host
with Bed(Path(sys.argv[1]), [Host("a")]) as bed:
    print(bed.first("a"), bed.folder, flush=True)
    bed.popen("a", ["sleep", "1000"]).wait()
"""


def test_a_bed_whose_process_was_killed_is_gone_and_the_next_one_removes_its_folder(lay: Lay, tmp_path: Path) -> None:
    bed = lay([Host("a")])
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    first, folder = owner.stdout.readline().split()
    owner.kill()
    owner.wait(30)
    owner.stdout.close()
    until(lambda: not psutil.pid_exists(int(first)), 30)
    assert Path(folder).exists()
    lay([Host("a")])
    assert not Path(folder).exists() and bed.folder.exists()
