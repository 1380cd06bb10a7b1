"""The learner: mini-batches in, optimizer steps and weights out, without Ray (see docs/library.md)."""
