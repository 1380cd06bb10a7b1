"""Evaluation: its weights, its prompts, and its results."""
