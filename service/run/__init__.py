"""The folder of a run and its checkpoints; in rooms: what a run begins with, what it writes, whether it lives."""
