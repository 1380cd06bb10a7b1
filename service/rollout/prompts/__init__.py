"""The prompts of a run: datasets, mixtures, warm-start rows."""
