"""The policy on one rank: modules, weights, sharding, log-probabilities."""
