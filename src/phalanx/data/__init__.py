"""Which rank sees which sample, and in which order."""
