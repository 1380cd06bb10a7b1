"""The HTTP APIs with which clients call a language model. Each has pure functions that read a request and write the
answer."""
