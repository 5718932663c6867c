"""The random numbers of a rank: python's, numpy's, torch's and its GPU's, taken down and given back."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from phalanx import seeds
from phalanx.checkpoint.storage.manifest import Broken


def take(device: torch.device) -> dict[str, Any]:
    """Where each generator of this process stands."""
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def check(state: Any) -> None:
    """Raises Broken for what `take` has not taken."""
    try:
        version, numbers, _ = state["python"]
        kind, keys, *rest = state["numpy"]
        bytes_of = [state["torch"], *([] if state["cuda"] is None else [state["cuda"]])]
        is_right = type(version) is int and len(numbers) == 625 and all(type(each) is int for each in numbers)
        is_right &= isinstance(kind, str) and isinstance(keys, numpy.ndarray) and len(rest) == 3
        is_right &= all(isinstance(each, torch.Tensor) and each.dtype == torch.uint8 for each in bytes_of)
    except (KeyError, TypeError, ValueError):
        is_right = False
    if not is_right:
        raise Broken("its random generators are damaged")


def give_back(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def draw_anew(first: Mapping[str, Any], rank: int, size: int) -> None:
    """For a world of another size, in which nobody's numbers can be gone on with.

    The new ones follow from where rank 0 stood, so that resuming twice gives the same run, and from the size.
    """
    digest = hashlib.blake2b(first["torch"].numpy().tobytes() + b"%d" % size, digest_size=7).digest()
    seeds.seed_all(seeds.mixed(int.from_bytes(digest, "little"), rank))
