"""Checkpoints that are whole or not there, written beside training, for any number of ranks."""
