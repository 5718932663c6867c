"""The storage of checkpoints, and the format of their files."""
