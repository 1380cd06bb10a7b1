"""From log-probabilities to one loss: terms, advantages, corrections, reduction."""
