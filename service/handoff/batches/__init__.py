"""Makes mini-batches from complete groups: filters, advantages, packing."""
