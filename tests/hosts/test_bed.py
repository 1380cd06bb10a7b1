"""The hosts that the tests run on are cut off, killed and made anew; else a test of a lost host would show nothing."""

import sys
from collections.abc import Callable, Sequence

from tests.hosts.bed import Bed, Host
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
