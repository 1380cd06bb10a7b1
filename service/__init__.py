"""The parts of Baton that need neither Ray nor vLLM, so that they can be tested on a laptop."""
