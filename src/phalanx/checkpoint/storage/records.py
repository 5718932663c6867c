"""What the ranks tell each other of a save, through the store: plain data, checked before it is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.checkpoint.storage.base import Fact
from phalanx.checkpoint.storage.manifest import Chunk, Described, described
from phalanx.errors import CheckpointError

_UNWRITTEN = Fact(0, 0)
Rows = tuple[str, str, tuple[int, ...], int, int]
"""Name, type and whole shape of a tensor; the first row of it that a rank has written, and how many."""


@dataclass(frozen=True)
class Share:
    """What one rank hands in when it has written its file, or could not."""

    step: int
    digest: str
    rows: Sequence[Rows] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    rng: Any = None
    fact: Fact = _UNWRITTEN
    error: str = ""

    def written(self, fact: Fact) -> Share:
        return replace(self, fact=fact)

    def failed(self, error: str) -> Share:
        return Share(self.step, self.digest, error=error)

    def encode(self) -> dict[str, Any]:
        return {**vars(self), "fact": [self.fact.bytes, self.fact.crc32]}

    @staticmethod
    def decode(node: Any, rank: int) -> Share:
        """CheckpointError for whatever `encode` has not made."""
        try:
            size, crc = node["fact"]
            rows = [_rows(*each) for each in node["rows"]]
            share = Share(**{**node, "rows": rows, "fact": Fact(size, crc)})
        except (KeyError, TypeError, ValueError):
            share = None
        kinds = {"step": int, "digest": str, "values": dict, "error": str}
        if share is None or not all(type(getattr(share, name)) is kind for name, kind in kinds.items()):
            raise CheckpointError(f"what rank {rank} has reported for the checkpoint is damaged; save again.")
        return share


def _rows(name: Any, dtype: Any, shape: Any, first: Any, rows: Any) -> Rows:
    if type(name) is not str or type(first) is not int or type(rows) is not int:
        raise TypeError
    return name, dtype, tuple(shape), first, rows


def disagreement(shares: Sequence[Share]) -> str:
    """What keeps these from being one checkpoint; nothing if they are."""
    for share in shares:
        if share.error:
            return share.error
    first = shares[0]
    for rank, share in enumerate(shares):
        if share.step != first.step:
            return f"rank 0 saves step {first.step} and rank {rank} saves step {share.step}; save on all ranks alike."
        if share.digest != first.digest:
            return (
                f"at step {first.step} rank 0 and rank {rank} save different names, types or shapes; give save() the "
                "same parts on all ranks."
            )
    return ""


def merged(shares: Sequence[Share]) -> dict[str, Described]:
    """Every tensor of the checkpoint, with the rows that each rank has written of it."""
    found: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    for rank, share in enumerate(shares):
        for name, dtype, shape, first, rows in share.rows:
            found.setdefault(name, (dtype, shape, []))[2].append(Chunk(rank, first, rows))
    try:
        return {
            name: described([dtype, list(shape), [[each.rank, each.first, each.rows] for each in chunks]], len(shares))
            for name, (dtype, shape, chunks) in found.items()
        }
    except (TypeError, ValueError):
        raise CheckpointError("the shares of the ranks do not make whole tensors; save again.") from None
