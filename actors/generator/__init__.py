"""Generators, each with a vLLM engine and the loops that play trajectories; and the pool of all generators."""
