"""Makes mini-batches of complete groups: filter, credit, pack."""
