"""Serves agents that send conversations as messages. Each call keeps its exact tokens, even if the client edits
messages."""
