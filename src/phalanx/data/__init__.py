"""The distribution of samples: which rank sees which one, and in which order."""
