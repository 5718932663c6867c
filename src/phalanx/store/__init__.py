"""What the ranks of a run agree on through torch's store."""
