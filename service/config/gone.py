"""Settings that are gone, and what to use in place of each."""

from __future__ import annotations

GONE = {
    "buffer.drift": "a prompt that differs from its row always begins a new row; leave it out",
    "buffer.max_drift_tokens": "a prompt that differs from its row always begins a new row; leave it out",
}
"""Path of a setting that an earlier version had -> what to do, for the line that refuses it."""
