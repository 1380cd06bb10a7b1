"""The processes of scorers, and the engines of teachers."""
