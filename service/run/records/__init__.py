"""What a run writes for people: metrics, trajectories, timeline, logs, progress."""
