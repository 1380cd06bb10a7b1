"""Scorers: what asks them, what they are given, and the ways in which they answer (see docs/scorers.md)."""
