"""What each rank is doing, written into its status page without a change of the script.

`phases` follows the loop by torch's own hooks; `flight_reader` reads torch's flight recorder, which sees what gloo and
nccl do, and `p2p` what it does not see; `stores` notes where a rank connects to; `waits` tells waiting from own work.
`ddp_teardown` prevents a deadlock. The collectives of shm are noted by shm itself.
"""

from __future__ import annotations

from phalanx.recorder import ddp_teardown, flight_reader, p2p, phases, stores, waits

__all__ = ["install"]


def install() -> None:
    """torch is imported. Done once, also for all workers that will be forked."""
    phases.install()
    flight_reader.install()
    p2p.install()
    stores.install()
    waits.install()
    ddp_teardown.install()
