"""Serves agents that send conversations as messages. The exact tokens of each call are kept, even if the client edits
messages."""
