"""Evaluates a policy on engines, during a run or without a run."""
