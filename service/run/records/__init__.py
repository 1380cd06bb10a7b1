"""Writes a run's records for people: metrics, trajectories, timeline, logs, progress."""
