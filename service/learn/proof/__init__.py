"""The proof that training, in each of its layouts and divisions, computes a model family as its own code does."""
