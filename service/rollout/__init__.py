"""Rollout: plays trajectories of a policy in environments, and prepares what they need."""
