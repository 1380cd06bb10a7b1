"""The processes of scorers, and the engine of teachers and frozen roles."""
