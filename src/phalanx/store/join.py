"""Joining: from an address to a store that all ranks share, and the check that the ranks belong together.

torch's own rendezvous waits half an hour for a rank that will never come, and accepts one that came twice. Here every
rank first writes down who it is; ranks that do not fit together are an error on all of them within seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from phalanx import errors
from phalanx.errors import JoinError, MasterUnreachable, RanksDisagree, StaleStore, UsageError
from phalanx.messages import Count, Name, Pid, Rank, Record, Text
from phalanx.store import tcp_store
from phalanx.store.primitives import await_verdict, propose, read, wait_for, write
from phalanx.system import ports, procfs

if TYPE_CHECKING:
    from torch.distributed import Store

    from phalanx.cluster import Situation

JOIN_TIMEOUT = 300.0
"""Seconds for the store to answer, and again for all ranks to come."""
_TWIN_TIMEOUT = 2.0
"""Seconds for another process with the same rank to write down who it is."""
_READ_SECONDS = 1.0
"""Seconds for which the rank that serves the store leaves a failed verdict to the others."""
_LEAVE_TIMEOUT = 10.0
_joins = itertools.count()


class Claim(Record, frozen=True):
    """The identity of a rank, as it writes it down itself."""

    rank: Rank
    world_size: Rank
    host: Name
    pid: Pid
    born: Count
    """Clock ticks from the boot to the start of the process, to tell it from a later one with the same pid."""
    machine: Name
    """The running kernel and its pid namespace: a pid means one process only within these."""
    note: Text = ""
    """Whatever else the ranks have to know of each other."""

    @staticmethod
    def of_this_process(rank: int, world_size: int, note: str = "") -> Claim:
        born = procfs.start_ticks("self")
        return Claim(rank, world_size, socket.gethostname(), os.getpid(), born, _machine(), note)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def has_died(self) -> bool:
        """The process has ended; known only of processes on this machine."""
        return self.machine == _machine() and procfs.start_ticks(self.pid) != self.born


def _machine() -> str:
    return f"{procfs.boot_id()} {procfs.pid_namespace()}".strip() or socket.gethostname()


@dataclass(frozen=True)
class Meeting:
    """A store that all ranks are known to share, with nothing in it but the keys of this world."""

    store: Store
    claims: tuple[Claim, ...]
    hosted_here: bool
    """This process serves the store, so it has to leave last."""


def open_store(init_method: str, rank: int, world_size: int, up: bool, timeout: float) -> tuple[Store, bool]:
    """Opens the store behind ``tcp://host:port`` or ``file:///path``. Returns whether this process serves it, too."""
    try:
        url = urlparse(init_method)
        port = url.port
    except ValueError:  # brackets without an end, a port beyond 65535
        url, port = urlparse("tcp:"), None
    if url.scheme == "file":
        return _file_store(url.path, world_size), False
    if url.scheme != "tcp":
        raise UsageError(f"init_method {init_method!r} is unknown; use env://, tcp://host:port or file:///path.")
    if url.hostname is None or port is None:
        raise UsageError(
            f"init_method {init_method!r} has no port or no host; it should look like tcp://10.0.0.1:29500."
        )
    own = tcp_store.of_run(os.environ, port)
    if own is not None:
        return tcp_store.connect(*own, timeout), False
    if rank == 0 and not up:
        return _serve(url.hostname, port, timeout), True
    return tcp_store.connect(url.hostname, port, timeout), False


def _file_store(path: str, world_size: int) -> Store:
    from torch.distributed import FileStore

    if not path or not os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120 (False, also for a name that is too long)
        raise UsageError(f"the file {path!r} of init_method lies in no existing directory; make that first.")
    return FileStore(path, world_size)


def _serve(host: str, port: int, timeout: float) -> Store:
    from torch.distributed import DistError

    try:
        with contextlib.closing(ports.listen(_address_to_serve(host), port)) as listener:
            tcp_store.await_listener(host, port, timeout)  # its own name may appear late
            return tcp_store.serve(host, listener, timeout)
    except errors.LaunchError as error:
        raise JoinError(f"rank 0 cannot serve {host}:{port}: {error}") from None
    except (DistError, MasterUnreachable) as error:
        raise MasterUnreachable(f"rank 0 serves {host}:{port} and cannot reach it: {_first_line(error)}") from None


def _address_to_serve(host: str) -> str:
    """Returns loopback for a master on loopback; any other name may stand for several addresses, so all of them."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return ports.LOOPBACK if host == "localhost" else host
    return "::" if ":" in host else "0.0.0.0"


def meet(store: Store, rank: int, world_size: int, timeout: float, hosted_here: bool, note: str = "") -> Meeting:
    """Signs in to a part of the store that is for this world alone."""
    from torch.distributed import PrefixStore

    # A process may join, leave and join again; all do so equally often, so the number keeps the worlds apart.
    own = PrefixStore(f"phalanx/world-{next(_joins)}", store)
    return Meeting(own, sign_in(PrefixStore("join", own), rank, world_size, timeout, hosted_here, note), hosted_here)


def sign_in(
    store: Store, rank: int, world_size: int, timeout: float, hosted_here: bool = False, note: str = ""
) -> tuple[Claim, ...]:
    """Waits until every rank is there, once, with the same world size; otherwise the error names who is wrong."""
    own = _SignIn(store, Claim.of_this_process(rank, world_size, note))
    try:
        own.sign()
        verdict = own.await_verdict(timeout)
        if verdict.error is not None:
            if hosted_here:
                time.sleep(_READ_SECONDS)
            raise _KINDS.get(verdict.error, JoinError)(verdict.text)
        return own.claims()
    except RuntimeError as error:
        if isinstance(error, errors.PhalanxError):
            raise
        raise JoinError(f"rank {rank} lost the store while joining: {_first_line(error)}") from None


def join(
    situation: Situation, init_method: str | None, store: Store | None, limit: float | None, device: str = ""
) -> tuple[Meeting, str]:
    """Opens the store and meets the other ranks there; returns also the address of the store.

    ``device``: what tells this rank's accelerator from all others; empty if it may be shared.
    """
    from torch.distributed import PrefixStore

    if store is not None:
        if init_method is not None:
            raise UsageError(f"both a store and init_method={init_method!r} were given; give one of them.")
        where, hosted = type(store).__name__, False
    else:
        method = init_method or "env://"
        up = False
        if method.startswith("env://"):
            if situation.world_size == 1 and situation.master is None:
                return meet(tcp_store.private(), 0, 1, JOIN_TIMEOUT, hosted_here=False), "none"
            if situation.master is None:
                raise UsageError(
                    f"rank {situation.rank} of {situation.world_size} does not know where to meet; "
                    "set MASTER_ADDR and MASTER_PORT, or give init_method='tcp://host:port'."
                )
            host, port = situation.master
            method = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
            up = situation.store_is_up
        where = method.partition("://")[2]
        store, hosted = open_store(method, situation.rank, situation.world_size, up, limit or JOIN_TIMEOUT)
    # torchrun's store outlives a restart, with the keys of the ranks that died; each attempt reads its own.
    own = PrefixStore(f"{situation.job}attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    meeting = meet(own, situation.rank, situation.world_size, limit or JOIN_TIMEOUT, hosted, device)
    check_devices(meeting.claims)
    return meeting, where


def check_devices(claims: Sequence[Claim]) -> None:
    """Raises UsageError on all ranks if two of them have one device. Collectives of such ranks fail or hang."""
    first: dict[tuple[str, str], Claim] = {}
    for claim in claims:
        other = first.setdefault((claim.machine, claim.note), claim)
        if claim.note and other is not claim:
            raise UsageError(
                f"ranks {other.rank} and {claim.rank} have the same GPU on host {claim.host}; start one rank for each "
                "GPU, or give px.init(device=…) another one."
            )


def leave_store(meeting: Meeting, size: int) -> None:
    """Leaves the store. The rank that serves it leaves last, or the others could lose it before they are done."""
    if meeting.store.add("phalanx/left", 1) == size:
        write(meeting.store, "phalanx/all left", True)
    if meeting.hosted_here:
        wait_for(meeting.store, "phalanx/all left", _LEAVE_TIMEOUT)


class _Verdict(Record, frozen=True):
    """The result for all ranks; without an error they belong together."""

    error: Name | None = None
    """The name of one of `_KINDS`."""
    text: Text = ""


_KINDS = {kind.__name__: kind for kind in (JoinError, RanksDisagree, StaleStore)}


class _SignIn:
    """The sign-in of one rank. A rank that finds an error writes the verdict for all."""

    def __init__(self, store: Store, claim: Claim) -> None:
        self._store, self._claim = store, claim

    def sign(self) -> None:
        mine = self._claim
        if self._store.add(f"taken/{mine.rank}", 1) > 1:
            self._reject_twin()
            return
        write(self._store, f"claim/{mine.rank}", mine)
        other = propose(self._store, "first", mine)
        if other.world_size != mine.world_size:
            self._fail(
                RanksDisagree,
                f"{mine} was given world size {mine.world_size}, but {other} was given {other.world_size}; "
                "start all of them with the same.",
            )
        elif self._store.add("arrived", 1) == mine.world_size:
            dead = [claim for claim in self.claims() if claim.has_died]
            if dead:
                self._fail(StaleStore, f"the store remembers {dead[0]}, which has ended: it is left over. {_REMOVE}")
            else:
                write(self._store, "verdict", _Verdict())

    def _reject_twin(self) -> None:
        mine = self._claim
        wait_for(self._store, f"claim/{mine.rank}", _TWIN_TIMEOUT)
        other = read(self._store, f"claim/{mine.rank}", Claim)
        if other.has_died:
            text = f"the store remembers {other}, which has ended: it is left over from an earlier run. {_REMOVE}"
            raise StaleStore(text)
        self._fail(RanksDisagree, f"two processes claim one rank: {other} and pid {mine.pid} on {mine.host}.")

    def _fail(self, kind: type[JoinError], text: str) -> None:
        write(self._store, "verdict", _Verdict(kind.__name__, text))

    def await_verdict(self, timeout: float) -> _Verdict:
        who, size = str(self._claim), self._claim.world_size
        missing = await_verdict(self._store, "claim", size, timeout, who, "ranks that have not come")
        if missing:
            self._fail(JoinError, missing)
        return read(self._store, "verdict", _Verdict)

    def claims(self) -> tuple[Claim, ...]:
        return tuple(read(self._store, f"claim/{rank}", Claim) for rank in range(self._claim.world_size))


_REMOVE = "Remove the file, or give another one."


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
