"""Writes what each rank is doing into its status page, without a change of the script.

`phases` follows the loop by torch's own hooks. `flight_reader` reads torch's flight recorder, which sees the
collectives of gloo and nccl. `waits` and `ddp_models` tell waiting from own work. shm writes its collectives itself.
"""

from __future__ import annotations

from phalanx.recorder import ddp_models, flight_reader, phases, waits

__all__ = ["install"]


def install() -> None:
    """Installs all hooks, once and also for all workers that will be forked. torch must be imported."""
    phases.install()
    flight_reader.install()
    waits.install()
    ddp_models.install()
