"""The driver: starts Ray, places the actors, runs the training loop."""
