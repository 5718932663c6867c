"""Random numbers that can be drawn again."""

from __future__ import annotations

import hashlib


def seed_all(seed: int) -> None:
    """Seeds python, numpy and torch."""
    import random

    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def mixed(seed: int, rank: int) -> int:
    """A seed for a rank. Unlike ``seed + rank``, no rank of a run with the next seed has it too."""
    digest = hashlib.blake2b(f"{seed} {rank}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
