"""What people and programs see of a run: metrics, status, trajectories, trackers, plots."""
