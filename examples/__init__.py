"""Demonstration environments and the data made for them."""
