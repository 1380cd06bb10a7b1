"""The buffer under a virtual clock, with simulated generators, trainer, network, disk and faults.

    generators --requests--> NETWORK --> HOST (the real Buffer and Journal) <-- NETWORK <--requests-- trainer
                             delays, losses,     on a disk in memory that
                             doubles             fills up and forgets

Nothing here is a second version of the buffer: it is `service.handoff.buffer.Buffer` on a clock that jumps from event
to event, so that hours pass in seconds and every run repeats itself from its seed.
"""
