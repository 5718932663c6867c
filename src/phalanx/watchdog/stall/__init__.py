"""Ranks that make no progress: when, why, and on which node."""
