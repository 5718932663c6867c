"""Finds the cause of a failed run, and describes it."""
