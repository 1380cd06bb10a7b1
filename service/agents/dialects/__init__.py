"""The HTTP APIs by which clients call a language model. For each API, pure functions read a request and write the
answer."""
