"""Generators (each has a vLLM engine, and loops that play trajectories), and the pool of all generators."""
