"""Environments of other libraries as environments of Baton: examples to copy and change (docs/environments.md)."""
