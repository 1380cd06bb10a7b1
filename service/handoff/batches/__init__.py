"""Makes mini-batches of complete groups: score, filter, pack."""
