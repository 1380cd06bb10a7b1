"""The processes of scorers, and their engine."""
