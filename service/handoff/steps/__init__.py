"""Steps: their columns, their wire format, and limits on messages with steps."""
