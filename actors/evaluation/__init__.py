"""Evaluation on engines: beside a run, and alone."""
