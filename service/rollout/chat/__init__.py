"""From messages to token ids and back."""
