"""The exceptions of collectives. They name both sides, in one or two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from phalanx import errors
from phalanx.native import library
from phalanx.native.library import Failure, Signature
from phalanx.shm.node.tensors import DTYPE_NAMES, REDUCE_NAMES


# Both ``except px.PhalanxError`` and ``except dist.DistBackendError`` catch each of these.
class PeerLost(errors.PeerLost, dist.DistBackendError):
    __doc__ = errors.PeerLost.__doc__


class CollectiveMismatch(errors.CollectiveMismatch, dist.DistBackendError):
    __doc__ = errors.CollectiveMismatch.__doc__


class CollectiveTimeout(errors.CollectiveTimeout, dist.DistBackendError):
    __doc__ = errors.CollectiveTimeout.__doc__


class CollectiveAborted(errors.CollectiveAborted, dist.DistBackendError):
    __doc__ = errors.CollectiveAborted.__doc__


for _kind in (PeerLost, CollectiveMismatch, CollectiveTimeout, CollectiveAborted):
    _kind.__module__ = errors.__name__  # where users import them from


@dataclass
class Names:
    """The names of a group's ranks and collectives in error messages."""

    group: str
    ranks: Sequence[int]
    """The global rank of each rank of the group."""
    timeout: float
    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    """The host of each rank, if there are several nodes."""
    number: int | None = None
    """The running collective, with several nodes: the library counts the steps within a node."""

    def __call__(self, rank: int) -> str:
        return f"rank {self.ranks[rank]}"

    def those(self, ranks: Sequence[int], joint: str = ", ") -> str:
        return f"rank{'s' * (len(ranks) > 1)} {joint.join(str(self.ranks[rank]) for rank in ranks)}"

    def process(self, rank: int) -> str:
        host = f"host {self.hosts[rank]}, " if self.hosts else ""
        return f"{self(rank)} ({host}pid {self.pids[rank]})"

    def where(self, number: int | None = None) -> str:
        return f"collective #{self.number if self.number is not None else number} of group '{self.group}'"


def to_exception(failure: Failure, names: Names) -> Exception:
    number = failure.number - 1  # the library's first collective is the barrier that forms the group
    if failure.kind == library.MISMATCH:
        return mismatch(names, failure.finder, failure.finders, failure.culprit, failure.culprits, number)
    if failure.kind == library.SPLITS:
        return splits(names, failure.culprit, failure.receiver, failure.sent, failure.expected, number)
    if failure.kind == library.LOST:
        return lost(names, failure.culprit, number)
    if failure.kind == library.LEFT:
        return left(names, failure.culprit, number)
    if failure.kind == library.TIMEOUT:
        return timed_out(names, failure.finder, failure.missing_ranks(), failure.timeout_ns / 1e9, number)
    return aborted(names, failure.finder, number)


def mismatch(
    names: Names, finder: int, ours: Signature, culprit: int, theirs: Signature, number: int | None = None
) -> CollectiveMismatch:
    return CollectiveMismatch(
        f"{names(culprit)} called {_spell(theirs, ours, names)} where {names(finder)} called "
        f"{_spell(ours, theirs, names)}; {names.where(number)}."
    )


def splits(
    names: Names, sender: int, receiver: int, sent: int, expected: int, number: int | None = None
) -> CollectiveMismatch:
    return CollectiveMismatch(
        f"{names(sender)} sends {sent} elements to {names(receiver)} in all_to_all, "
        f"where {names(receiver)} expects {expected}; {names.where(number)}."
    )


def lost(names: Names, rank: int, number: int | None = None) -> PeerLost:
    return PeerLost(f"{names.process(rank)} has ended without taking part in {names.where(number)}.")


def unreachable(names: Names, rank: int, why: str) -> PeerLost:
    return PeerLost(f"{names.process(rank)} has ended or cannot be reached in {names.where()}: {why}")


def cut_off(names: Names, rank: int) -> PeerLost:
    return PeerLost(f"{names.process(rank)} has lost contact with the other nodes and the store, in {names.where()}.")


def left(names: Names, rank: int, number: int | None = None) -> PeerLost:
    return PeerLost(f"{names(rank)} has left the group and never comes to {names.where(number)}.")


def timed_out(
    names: Names, finder: int, missing: Sequence[int], seconds: float, number: int | None = None
) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"the timeout of {seconds:g} s is over: {names(finder)} waited for {names.those(missing)}; "
        f"{names.where(number)}."
    )


def aborted(names: Names, finder: int, number: int | None = None) -> CollectiveAborted:
    return CollectiveAborted(f"{names(finder)} aborted the group; {names.where(number)}.")


def by_name(kind: str, text: str) -> Exception:
    """Returns the exception that another process has described."""
    kinds = {found.__name__: found for found in (PeerLost, CollectiveMismatch, CollectiveTimeout, CollectiveAborted)}
    if kind not in kinds:
        raise errors.ForeignData(f"another rank reports a failure of the unknown kind {kind!r:.50}.")
    return kinds[kind](text)


def _spell(call: Signature, other: Signature, names: Names) -> str:
    """Returns ``all_reduce(float32[12], max)``, with operator and root only if they differ."""
    name = library.OPS[call.op]
    inside = []
    if call.op != library.BARRIER:
        inside.append(
            f"{DTYPE_NAMES[call.dtype]}[{call.count}]" if call.op != library.ALL_TO_ALL else DTYPE_NAMES[call.dtype]
        )
    if call.op in (library.ALL_REDUCE, library.REDUCE, library.REDUCE_SCATTER) and call.op == other.op:
        if call.reduce != other.reduce:
            inside.append(REDUCE_NAMES[call.reduce])
        elif call.factor != other.factor:
            inside.append(f"{REDUCE_NAMES[call.reduce]} by {call.factor:g}")
    if call.root >= 0 and (call.op == other.op and call.root != other.root):
        inside.append(f"root {names.ranks[call.root]}")
    return f"{name}({', '.join(inside)})"
