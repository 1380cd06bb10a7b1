"""Scorers: who calls them, their input, and the kinds of scorers (see docs/scorers.md)."""
