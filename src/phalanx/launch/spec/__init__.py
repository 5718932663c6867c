"""The specification of a run: its ranks, hosts and devices. A leaf of the launcher."""
