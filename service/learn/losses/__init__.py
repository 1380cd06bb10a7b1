"""Computes the loss from log-probabilities: policy loss, advantages of tokens, off-policy correction, reduction."""
