"""Trains the policy without Ray: takes mini-batches, makes optimizer steps, returns weights (see docs/library.md)."""
