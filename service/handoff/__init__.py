"""The handoff: everything between a generator's steps and a trainer's mini-batch, without Ray (see README.md)."""
