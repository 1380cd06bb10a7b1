"""Baton without Ray and vLLM: everything a laptop can test."""
