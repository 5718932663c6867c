"""The nodes of a run: how they meet, find each other alive, and carry messages for the watchdogs.

This file has a run on one node, which needs none of the others, and the choice between it and `peers.Peers`.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from phalanx.events import Ending
from phalanx.fd_channel import Channel
from phalanx.launch.spec.launch_spec import LaunchSpec, Placement, placements

if TYPE_CHECKING:
    from phalanx.launch.multinode.peers import Peers
    from phalanx.launch.spec.network import Route

Loop = Callable[[Callable[[], bool]], None]
"""Runs the agent's event loop until something is true."""


class RunOver(Exception):
    """The run has ended before this node could take part."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Note(Protocol):
    """Writes a line of the event file."""

    def __call__(self, kind: str, /, **fields: object) -> None: ...


class Keeper(Protocol):
    """What a node's keeper offers: the store of the ranks, or a channel to the session with other nodes."""

    @property
    def keeper(self) -> Channel: ...
    @property
    def address(self) -> tuple[str, int] | None: ...
    def fresh_store(self) -> object: ...


def new_peers(
    spec: LaunchSpec,
    route: Route | None,
    keeper: Keeper,
    selector: selectors.BaseSelector,
    directory: Path,
    say: Callable[[str], None],
    show: Callable[[str], bool],
    note: Note,
) -> SingleNode | Peers:
    """``route``: to the other nodes, if any; ``show`` shows a line for a moment, and returns whether anybody saw it."""
    if route is None:
        return SingleNode(keeper, spec.nproc_per_node)
    from phalanx.launch.multinode.peers import Peers

    return Peers(spec, route, keeper.keeper, selector, directory, say, show, note)


class SingleNode:
    """A run on this node alone."""

    exchange = None
    stop_reason: str | None = None
    lost: dict[int, str] = {}  # noqa: RUF012 (it stays empty)
    name = "this node"
    can_go_on = True

    def __init__(self, keeper: Keeper, nproc: int) -> None:
        self._keeper = keeper
        self._placements = placements([nproc])

    def meet(self, attempt: int, loop: Loop) -> int:
        """Meets the other nodes, of which there are none."""
        return attempt

    def introduction(self) -> str | None:
        """Who takes part, when that is news."""
        return None

    def begin(self, attempt: int, loop: Loop) -> tuple[str, int]:
        """Where the workers of this attempt meet."""
        self._keeper.fresh_store()
        assert self._keeper.address is not None
        return self._keeper.address

    def places(self) -> list[Placement]:
        """The ranks of this node."""
        return self._placements

    def tell_stop(self, why: str, *, for_good: bool) -> None:
        """The ranks of this node are being stopped; ``for_good``: there is to be no other attempt."""

    def settle(self, endings: list[Ending], loop: Loop) -> list[Ending]:
        """How the ranks of all nodes ended."""
        return endings

    def loss(self) -> str:
        """The nodes that are gone, in a sentence."""
        return ""

    def log_of(self, ending: Ending) -> str | None:
        """The run directory with a rank's log, when it is on another node."""
        return None

    def told_as(self, directory: str) -> str:
        """A directory of this node, as it is named on the consoles of all nodes."""
        return directory

    def close(self, exit_code: int | None) -> None:
        pass
