"""Proves that training computes a model family as the family's own code does, in every layout and division among
ranks."""
