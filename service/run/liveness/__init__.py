"""Whether processes of a run live, memory is left, and trajectories fail again and again."""
