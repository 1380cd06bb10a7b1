"""Scorers: how groups are sent to them, their input, and the kinds of scorers (see docs/scorers.md)."""
