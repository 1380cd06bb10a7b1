"""Code around vLLM: its arguments, one engine, the update of its weights, and the extension of its worker."""
