"""`px.stop`: has this run to stop, and why. All ranks see it at the same step."""

from __future__ import annotations

import sys

from phalanx.argparser import shown
from phalanx.errors import UsageError
from phalanx.preemption import stop_point


class Stop:
    """A request to stop, by a scheduler's signal, a time limit, Ctrl-C or a rank of the run itself.

        for batch in loader:
            ...
            optimizer.step()
            if px.stop.requested:
                save()
                break

    It becomes true at the same step on every rank, at the end of an optimizer's step. Once a script has asked, a signal
    no longer ends it: it has to stop by itself. Without ``phalanx run``, signals do what they always do.
    """

    @property
    def requested(self) -> bool:
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """``SIGTERM``, ``the time limit``, or what `request` was given; None as long as nothing is requested."""
        points = stop_point.current()
        if points is not None:
            points.ask()
        return stop_point.reason()

    def request(self, reason: str) -> None:
        """Asks all ranks to stop, from any one of them."""
        if not isinstance(reason, str) or not reason:
            raise UsageError(f"reason is {shown(reason)}; give a short text.")
        points = stop_point.current()
        if points is not None:
            points.request(reason)
        elif _is_alone():
            stop_point.request_alone(reason)
        else:
            raise UsageError("px.stop.request needs `phalanx run`: under another launcher the ranks cannot agree.")


def _is_alone() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is None or not dist.is_initialized() or dist.get_world_size() == 1


stop = Stop()
