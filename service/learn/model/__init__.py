"""The policy on one rank: its modules, weights, sharding and log-probabilities."""
