"""Conversations of agents that come as messages: exact tokens for each call, whatever the client changes."""
