"""Ranks that make no progress: noticed, explained, and ended if that was asked for."""
