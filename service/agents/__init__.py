"""Agents that send conversations as messages: each call keeps its exact tokens, even if the client edits messages."""
