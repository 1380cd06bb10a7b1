"""Watches a run: whether its processes live, whether memory is left, and whether trajectories fail repeatedly."""
