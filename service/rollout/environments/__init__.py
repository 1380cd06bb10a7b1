"""Environments by name, isolated or not, and the adapters to other libraries."""
