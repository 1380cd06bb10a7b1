"""The buffer under a virtual clock, with simulated generators, trainer, network, disk and faults.

    generators --requests--> NETWORK --> HOST (the real Buffer and Journal) <-- NETWORK <--requests-- trainer
                             delays, losses,     on a disk in memory that
                             doubles             fills up and loses power

The buffer is `service.handoff.buffer.Buffer` itself, on a clock that jumps from event to event. Hours pass in seconds,
and a seed decides everything that happens.
"""
