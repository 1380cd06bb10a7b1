"""Computes the loss from log-probabilities: policy terms, advantages, corrections, reduction."""
