"""Generators: a vLLM engine with agent loops beside it, and the pool of all of them."""
