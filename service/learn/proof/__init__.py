"""The proof that a model family is trained rightly: packed, shared, split and saved as its own code computes it."""
