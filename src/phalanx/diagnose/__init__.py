"""EXPLAIN: what happened, read from what the ranks left behind."""
