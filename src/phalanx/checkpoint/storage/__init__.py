"""Where checkpoints are kept, and the form of their files."""
