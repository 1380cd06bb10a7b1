"""The trainer: one Ray actor a rank."""
