"""Memory, operations and time of a training step, computed from a model's config.json before anything is loaded."""
