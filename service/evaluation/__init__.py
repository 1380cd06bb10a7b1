"""Evaluation: plays the trajectories of evaluation sets, computes their scores, and reports them."""
