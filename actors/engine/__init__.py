"""Runs vLLM as the engine of a generator: arguments, the engine, weight updates, and an extension of vLLM's worker."""
