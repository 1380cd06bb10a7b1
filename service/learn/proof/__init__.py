"""The proof that training computes a model family as its own code does: packed, with shared prefixes, split, saved."""
