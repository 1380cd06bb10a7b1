"""Runs commands as agents: a throw-away folder, limits and a score for each trajectory."""
