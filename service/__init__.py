"""The parts of Baton that need neither Ray nor vLLM, so that a laptop can test them."""
