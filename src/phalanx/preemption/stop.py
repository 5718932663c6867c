"""`px.stop`: has this run to stop, and why. All ranks see it at the same step."""

from __future__ import annotations

import mmap

from phalanx.argparser import shown
from phalanx.errors import UsageError
from phalanx.preemption import stop_point
from phalanx.preemption.stop_point import StopPoints
from phalanx.status import layout


class Stop:
    """A request to stop, by a scheduler's signal, a time limit, Ctrl-C or a rank of the run itself.

        for batch in loader:
            ...
            optimizer.step()
            if px.stop.requested:
                save()
                break

    It becomes true at the same step on every rank, at the end of an optimizer's step. Once a script has asked, a signal
    no longer ends it: it has to stop by itself.
    """

    @property
    def requested(self) -> bool:
        return _points().reason is not None

    @property
    def reason(self) -> str | None:
        """``SIGTERM``, ``the time limit of 3 h``, or what `request` was given; None as long as nothing is requested."""
        return _points().reason

    def request(self, reason: str) -> None:
        """Asks all ranks to stop, from any one of them."""
        if not isinstance(reason, str) or not reason:
            raise UsageError(f"reason is {shown(reason)}; give a short text.")
        _points().request(reason)


stop = Stop()


def _points() -> StopPoints:
    points = stop_point.current()
    if points is None:  # no agent: a world of one, or another launcher
        points = stop_point.begin(mmap.mmap(-1, layout.PAGE_BYTES), lambda number, reason: False)
    points.ask()
    return points
