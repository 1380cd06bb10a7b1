"""Estimates of a training step's memory, operations and time, computed from a model's config.json alone."""
