"""Which rank sees which sample, and in which order.

`ShardSampler` is for datasets with a length, `shard` for iterables. Both give every sample to one rank.
"""

from __future__ import annotations

from phalanx.data.iterable import ShardedIterable, shard
from phalanx.data.permutation import Permutation
from phalanx.data.sampler import ShardSampler

__all__ = ["Permutation", "ShardSampler", "ShardedIterable", "shard"]
