"""MOVE: who goes first, who speaks, and helpers over torch.distributed."""
