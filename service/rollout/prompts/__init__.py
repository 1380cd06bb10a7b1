"""The prompts of a run: reads datasets, mixes them, and makes rows for supervised steps."""
