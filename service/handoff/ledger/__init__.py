"""The state of groups and trajectories, and the events that change it."""
