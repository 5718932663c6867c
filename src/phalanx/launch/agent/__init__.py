"""The agent: one process on each node, without torch, that starts, watches and ends the ranks."""
