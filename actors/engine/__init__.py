"""vLLM: its arguments, one engine, its update and its worker."""
