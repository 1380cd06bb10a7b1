"""The trainer: one Ray actor per rank."""
