"""Prefix sharing: steps that continue one another are sent, kept and trained once."""
