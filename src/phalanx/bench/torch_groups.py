"""Inside the ranks: the two backends of torch that are compared, side by side in the same processes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx import backends

Groups = dict[str, dist.ProcessGroup]


def both_groups() -> Groups:
    """Joins the world, through shm, and makes a second group of all ranks through gloo."""
    dist.init_process_group("shm")
    groups = {"shm": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    found = {}
    for name, group in groups.items():
        # `phalanx run` gives a script shm where it asks for gloo; here that would compare shm with itself.
        if not isinstance(group, dist.ProcessGroup) or backends.is_shm(group) != (name == "shm"):
            raise RuntimeError(f"asked for {name}, and got {group}")
        found[name] = group
    return found


def agree(number: int) -> int:
    """The first rank's number, on all ranks."""
    tensor = torch.tensor([number])
    dist.broadcast(tensor, 0)
    return int(tensor.item())
