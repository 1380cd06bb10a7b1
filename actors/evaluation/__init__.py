"""Evaluation on engines, during a run or without one."""
