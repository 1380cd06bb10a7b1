"""Runs commands as agents: a temporary folder, limits and a score for each trajectory."""
