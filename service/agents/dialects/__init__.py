"""The forms in which clients ask a language model over HTTP, each as a pair of pure functions: read and answer."""
