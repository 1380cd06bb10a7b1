"""`make cluster-demo`: four Ray hosts on this machine, and the quick start over them, to look at and to disturb.

Ctrl-C ends the run in order, and then the hosts.
"""

import signal
import sys

from tests.hosts.bed import ROOT, Bed, Host, Process, unsupported

HOSTS = (Host("head", cpus=0), Host("ranks"), Host("engines-1"), Host("engines-2"))
SETTINGS = (
    "generator.engines=2",
    "trainer.checkpoint_every=10",
    "placement.generators={host: 'in(engines-1, engines-2)'}",
)
STOP_SECONDS = 120.0
"""After a Ctrl-C, for the final weights."""


def how_to_look(bed: Bed) -> list[str]:
    """Commands that look at the hosts and disturb them, for another terminal of root."""
    first = {name: bed.first(name) for name in bed.hosts}
    enter = f"nsenter --net --target {first[bed.head]}"
    return [
        f"  the status:           {enter} {sys.executable} -m service status",
        f"  a shell in a host:    nsenter --all --target {first['engines-1']} sh",
        f"  kill a host:          kill -9 {first['engines-1']}",
        f"  cut a link, mend it:  nsenter --net --target {first['ranks']} ip link set e0 down; ... up",
    ]


def main(settings: list[str]) -> int:
    """Run until the end or Ctrl-C; the exit code of the run, or 2 where no hosts can be made."""
    if (why := unsupported()) is not None:
        print(f"baton: {why}", file=sys.stderr)
        return 2
    folder = ROOT / "runs"
    folder.mkdir(exist_ok=True)
    with Bed(folder, HOSTS) as bed:
        print(f"hosts: {', '.join(f'{name} {address}' for name, address in bed.addresses.items())}; starting Ray ...")
        bed.start_ray()
        print("in another terminal:", *how_to_look(bed), sep="\n", flush=True)
        command = ["run", "--config", "configs/quickstart.yaml", f"run.dir={folder}", *SETTINGS, *settings]
        return ended(bed.popen(bed.head, [sys.executable, "-m", "service", *command], RAY_ADDRESS=bed.address))


def ended(run: Process) -> int:
    """Wait for the end of the run. The first Ctrl-C is passed on to the run; a second one ends the hosts at once."""
    try:
        return run.wait()
    except KeyboardInterrupt:
        run.send_signal(signal.SIGINT)
        return run.wait(STOP_SECONDS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
