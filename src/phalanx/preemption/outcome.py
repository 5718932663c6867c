"""How a stop ended: at which step, and which ranks could not finish what they were saving."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from phalanx.events import Ending, StopRecord
from phalanx.status.layout import those

_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_INCOMPLETE = "what was being saved may be incomplete"


def record(by: str, step: int | None, endings: Sequence[Ending]) -> StopRecord:
    """``by``: what has stopped the run; ``step``: the optimizer steps of all ranks, if they have agreed on one."""
    late = [ending for ending in endings if ending.asked]
    return StopRecord(
        by=by,
        step=step,
        saved={ending.rank: ending.progress[0] for ending in endings if ending.progress[0]},
        killed=tuple(ending.rank for ending in late if ending.signal == signal.SIGKILL),
        failed=tuple(ending.rank for ending in late if _has_failed(ending)),
    )


def _has_failed(ending: Ending) -> bool:
    """A script may end by the signal, or by its exit code, once it has saved."""
    if ending.signal is not None:
        return ending.signal not in (*_STOPS, signal.SIGKILL)
    return bool(ending.exit_code) and ending.exit_code not in [128 + number for number in _STOPS]


def lines(stop: StopRecord, seconds: float | None, endings: Sequence[Ending]) -> list[str]:
    """The lines for the console: what could not be saved, or that all ranks have ended by themselves.

    ``seconds``: the time that they had; None if somebody did not want to wait.
    """
    found = []
    if stop.killed:
        late = "" if seconds is None else f"had not ended {seconds:.0f} s after {stop.by} and "
        were = "were" if len(stop.killed) > 1 else "was"
        found.append(f"{those(stop.killed)} {late}{were} killed; {_INCOMPLETE}")
    if stop.failed:
        found.append(f"{those(stop.failed)} failed after {stop.by}; {_INCOMPLETE}")
    if found or not endings or any(ending.signal for ending in endings):
        return found
    at = f" after {stop.step} steps" if stop.step is not None else ""
    last = f"; the last checkpoint is of step {max(stop.saved.values())}" if stop.saved else ""
    return [f"stopped by {stop.by}{at}; all ranks have ended by themselves{last}"]
