"""What is to be launched: the spec of a run, its ranks, hosts and devices. A leaf of the launcher."""
