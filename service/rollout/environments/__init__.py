"""Finds environments by name; adapters to environments of other libraries."""
