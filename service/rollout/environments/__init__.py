"""Finds environments by name, and adapts environments of other libraries."""
