"""Check the promises in seeded worlds full of faults; the seed of a failure is printed.

examples:
  python -m tests.sim --worlds 5000
  python -m tests.sim --worlds 1 --seed 1234      # one world again
"""

import argparse
import logging
import sys
import time

from service.errors import BatonError
from tests.sim.world import fault_world


def check(first_seed: int, count: int) -> int:
    """Check worlds one after the other; returns how many broke a promise."""
    began, events, faults, failed = time.process_time(), 0, 0, []
    for name in ("service.scorers", "service.handoff.scoring"):
        logging.getLogger(name).setLevel(logging.ERROR)  # scorers fail on purpose
    for seed in range(first_seed, first_seed + count):
        world = fault_world(seed)
        try:
            world.run()
        except BatonError as broken:
            failed.append(seed)
            print(f"FAILED seed {seed}: {broken}\n  again: python -m tests.sim --worlds 1 --seed {seed}", flush=True)
        events += world.loop.events
        faults += world.fault_count + world.host.bad_answers
    seconds = time.process_time() - began
    print(
        f"{count} worlds from seed {first_seed}: {events} events, {faults} faults, {len(failed)} broke a promise "
        f"({seconds:.0f} s of CPU)"
    )
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=1, metavar="N", help="how many")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first world")
    arguments = parser.parse_args()
    sys.exit(min(check(arguments.seed, arguments.worlds), 1))
