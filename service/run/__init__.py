"""The run folder, its checkpoints, and what is prepared before a run starts."""
