"""The production buffer under a virtual clock, with simulated generators and a simulated trainer.

    generators --requests--> HOST (the real Buffer and Journal on a disk in memory) <--requests-- trainer

The clock jumps from event to event: hours pass in seconds, and a seed decides everything that happens. The tests add a
network, faulty disks, deaths of processes and bad answers (`tests/sim`).
"""
