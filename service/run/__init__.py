"""The run folder, its checkpoints, and the preparation of a run."""
