"""What a run, an evaluation or an export begins with: checkpoints, models and data, found and checked."""
