"""The random number generators of a rank: those of Python, numpy, torch and its GPU."""

from __future__ import annotations

import hashlib
import random

import numpy
import torch

from phalanx import seeds
from phalanx.checkpoint.storage.manifest import Broken
from phalanx.checkpoint.storage.values import StateDict


def capture(device: torch.device) -> StateDict:
    """Returns the state of each generator of this process."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def check(generators: object) -> StateDict:
    """Raises Broken for anything that `capture` has not returned."""
    state = generators if isinstance(generators, dict) else {}
    try:
        version, numbers, _ = state["python"]
        kind, keys, *rest = state["numpy"]
        tensors = [state["torch"], *([] if state["cuda"] is None else [state["cuda"]])]
        is_right = type(version) is int and len(numbers) == 625 and all(type(each) is int for each in numbers)
        is_right &= isinstance(kind, str) and isinstance(keys, numpy.ndarray) and len(rest) == 3
        is_right &= all(isinstance(each, torch.Tensor) and each.dtype == torch.uint8 for each in tensors)
    except (KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise Broken("its random generators are damaged")
    return state


def restore(state: StateDict, device: torch.device) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def reseed(state_of_rank_0: StateDict, rank: int, size: int) -> None:
    """Seeds the generators of a run that resumes with another world size, where no rank's state can be restored.

    The seeds depend on the state of rank 0 and on the size alone, so that resuming twice gives the same run.
    """
    digest = hashlib.blake2b(state_of_rank_0["torch"].numpy().tobytes() + b"%d" % size, digest_size=7).digest()
    seeds.seed_all(seeds.mixed(int.from_bytes(digest, "little"), rank))
