"""Evaluation: plays the trajectories of evaluation sets, and summarizes and reports their scores."""
