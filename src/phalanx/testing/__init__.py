"""Tools for tests of distributed code, ours and yours: functions on real ranks, the proof that a model may be split,
and hosts on one machine.

Importing this imports no torch.
"""

from phalanx.testing.equality import assert_parallel_equal
from phalanx.testing.ranks import close, run_ranks
from phalanx.testing.virtual_nodes import Node, VirtualNodes, virtual_nodes

__all__ = ["Node", "VirtualNodes", "assert_parallel_equal", "close", "run_ranks", "virtual_nodes"]
