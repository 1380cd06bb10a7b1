"""Sends groups to scorers and reads the answers: rewards, or a teacher's log-probabilities (see docs/scorers.md)."""
