"""The nodes of a run: how they meet, notice that one is lost, and carry messages for the watchdogs.

`SingleNode` here and `Peers` (peers.py) are what an agent knows of the nodes of its run. Behind `Peers` the agent's
keeper has a session (keeper_session.py) with the other nodes: protocol.py has the messages, links.py the connections,
hub.py their two ends, rendezvous.py and elastic.py the ways to meet. One node imports none of these.
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

RunUntil = Callable[[Callable[[], bool]], None]
"""Runs the agent's event loop until a condition is true."""


class RunOver(Exception):
    """The run has ended before this node could take part."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


class Note(Protocol):
    """Writes a line of the event file."""

    def __call__(self, kind: str, /, **fields: object) -> None: ...


class Keeper(Protocol):
    """A node's keeper: it serves the store of the ranks, or has the session with the other nodes."""

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
    """``route``: to the other nodes, if any; ``show`` shows a line for a moment, and returns True on a terminal."""
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
    can_restart = True
    is_first = True

    def __init__(self, keeper: Keeper, nproc: int) -> None:
        self._keeper = keeper
        self._placements = placements([nproc])

    def meet(self, attempt: int, run_until: RunUntil) -> int:
        """Meets the other nodes, of which there are none."""
        return attempt

    def introduction(self) -> str | None:
        """Returns the ranks and nodes of the run in a line; None for one node."""
        return None

    def begin(self, attempt: int, run_until: RunUntil) -> tuple[str, int]:
        """Begins an attempt. Returns the address of the workers' store."""
        self._keeper.fresh_store()
        assert self._keeper.address is not None
        return self._keeper.address

    def places(self) -> list[Placement]:
        """Returns the ranks of this node."""
        return self._placements

    def stop_others(self, why: str, *, for_good: bool) -> None:
        """Stops the other nodes, too; with ``for_good`` there is no other attempt."""

    def settle(self, endings: list[Ending], run_until: RunUntil) -> list[Ending]:
        """Returns the ends of the ranks of all nodes."""
        return endings

    def loss(self) -> str:
        """Returns a sentence about the nodes that are lost."""
        return ""

    def log_of(self, ending: Ending) -> str | None:
        """Returns the run directory with a rank's log if it is on another node."""
        return None

    def directory_label(self, directory: str) -> str:
        """Returns the name of a directory of this node on the consoles of all nodes."""
        return directory

    def close(self, exit_code: int | None) -> None:
        pass
