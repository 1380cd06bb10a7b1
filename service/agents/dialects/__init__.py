"""The HTTP APIs by which clients call a language model, each as a pair of pure functions: read and answer."""
