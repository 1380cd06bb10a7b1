"""The run folder and its checkpoints; and packages for the inputs of a run, its records, and its liveness."""
