"""Prefix sharing: the common prefix of steps that continue one another is sent, stored and trained once."""
