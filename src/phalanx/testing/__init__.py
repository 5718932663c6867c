"""For tests of distributed code, ours and yours: functions on real ranks, and the proof that a model may be split.

Importing this imports no torch.
"""

from phalanx.testing.equality import assert_parallel_equal
from phalanx.testing.ranks import close, run_ranks

__all__ = ["assert_parallel_equal", "close", "run_ranks"]
