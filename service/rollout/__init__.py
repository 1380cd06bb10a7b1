"""Plays trajectories of a policy in environments, and prepares prompts, chat templates and environments for playing."""
