"""Adapters that make other libraries' environments environments of Baton: examples to copy (docs/environments.md)."""
