"""Evaluation: which weights, which prompts, and the results."""
