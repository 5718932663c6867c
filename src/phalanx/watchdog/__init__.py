"""Watchdogs of the ranks: memory, stalls and stragglers."""
