"""vLLM: its arguments, one engine, the update of its weights, and its worker."""
