"""Computes one loss from log-probabilities: terms, advantages, corrections, reduction."""
