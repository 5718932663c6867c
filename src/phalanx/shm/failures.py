"""From a failure record in shared memory to the exception a rank raises: both sides named, in one or two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from phalanx import errors
from phalanx.shm import native
from phalanx.shm.native import Failure, Signature
from phalanx.shm.tensors import DTYPE_NAMES, REDUCE_NAMES


# Each is one of ours and one of torch's: ``except px.PhalanxError`` and ``except dist.DistBackendError`` both work.
class PeerLost(errors.PeerLost, dist.DistBackendError):
    __doc__ = errors.PeerLost.__doc__


class CollectiveMismatch(errors.CollectiveMismatch, dist.DistBackendError):
    __doc__ = errors.CollectiveMismatch.__doc__


class CollectiveTimeout(errors.CollectiveTimeout, dist.DistBackendError):
    __doc__ = errors.CollectiveTimeout.__doc__


class CollectiveAborted(errors.CollectiveAborted, dist.DistBackendError):
    __doc__ = errors.CollectiveAborted.__doc__


for _kind in (PeerLost, CollectiveMismatch, CollectiveTimeout, CollectiveAborted):
    _kind.__module__ = errors.__name__  # where users know them from


@dataclass
class Names:
    """What the numbers of a group are called."""

    group: str
    ranks: Sequence[int]
    """The number among all ranks of each rank of the group."""
    timeout: float
    pids: tuple[int, ...] = ()

    def __call__(self, rank: int) -> str:
        return f"rank {self.ranks[rank]}"

    def those(self, ranks: Sequence[int]) -> str:
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(self.ranks[rank]) for rank in ranks)}"


def to_exception(failure: Failure, names: Names) -> Exception:
    # The library's first one is the barrier that forms the group.
    where = f"collective #{failure.number - 1} of group '{names.group}'"
    finder = names(failure.finder)
    if failure.kind == native.MISMATCH:
        ours, theirs = failure.finders, failure.culprits
        return CollectiveMismatch(
            f"{names(failure.culprit)} called {_spell(theirs, ours, names)} where {finder} called "
            f"{_spell(ours, theirs, names)}; {where}."
        )
    if failure.kind == native.SPLITS:
        receiver = names(failure.receiver)
        return CollectiveMismatch(
            f"{names(failure.culprit)} sends {failure.sent} elements to {receiver} in all_to_all, "
            f"where {receiver} expects {failure.expected}; {where}."
        )
    if failure.kind == native.LOST:
        pid = names.pids[failure.culprit]
        return PeerLost(f"{names(failure.culprit)} (pid {pid}) has ended without taking part in {where}.")
    if failure.kind == native.LEFT:
        return PeerLost(f"{names(failure.culprit)} has left the group and never comes to {where}.")
    if failure.kind == native.TIMEOUT:
        missing = names.those(failure.missing_ranks())
        return CollectiveTimeout(f"the timeout of {names.timeout:g} s is over: {finder} waited for {missing}; {where}.")
    return CollectiveAborted(f"{finder} aborted the group; {where}.")


def _spell(call: Signature, other: Signature, names: Names) -> str:
    """``all_reduce(float32[12], max)``: the operator and the root only where they matter or differ."""
    name = native.OPS[call.op]
    inside = []
    if call.op != native.BARRIER:
        inside.append(
            f"{DTYPE_NAMES[call.dtype]}[{call.count}]" if call.op != native.ALL_TO_ALL else DTYPE_NAMES[call.dtype]
        )
    if call.op in (native.ALL_REDUCE, native.REDUCE, native.REDUCE_SCATTER) and call.op == other.op:
        if call.reduce != other.reduce:
            inside.append(REDUCE_NAMES[call.reduce])
        elif call.factor != other.factor:
            inside.append(f"{REDUCE_NAMES[call.reduce]} by {call.factor:g}")
    if call.root >= 0 and (call.op == other.op and call.root != other.root):
        inside.append(f"root {names.ranks[call.root]}")
    return f"{name}({', '.join(inside)})"
