"""What the agent watches while the ranks run."""
