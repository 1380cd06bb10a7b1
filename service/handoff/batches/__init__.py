"""Makes mini-batches from complete groups: filters groups, computes advantages, packs rows."""
