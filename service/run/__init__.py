"""The folder of a run, its checkpoints, and the preparation of its inputs."""
