"""Converts messages to token ids and back."""
