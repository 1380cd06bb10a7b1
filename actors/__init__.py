"""Thin Ray shells around `service`."""
