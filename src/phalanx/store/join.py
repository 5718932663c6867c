"""Joining: from an address to a store that all ranks share, and the check that they belong together.

torch's own rendezvous waits half an hour for a rank that will never come, and goes on with one that came twice.
Here every rank first writes down who it is; what does not fit together is an error on all of them within seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

from phalanx import errors, messages
from phalanx.errors import JoinError, MasterUnreachable, RanksDisagree, StaleStore, UsageError
from phalanx.messages import Count, Name, Pid, Rank, Record, Text
from phalanx.store import tcp_store
from phalanx.system import ports, procfs

_SLICE = 2.0
"""After which it is looked whether the others are still there."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two looks into the store: none needs to be longer than a fraction of what has been waited so far."""
_FIRST_WORD = 10.0
_LEAVE_TIMEOUT = 10.0
_joins = itertools.count()


class Claim(Record, frozen=True):
    """What a rank writes down about itself."""

    rank: Rank
    world_size: Rank
    host: Name
    pid: Pid
    born: Count
    """Start of the process in ticks since the boot, to tell it from a later one with the same pid."""
    machine: Name
    """The running kernel and its table of processes: only within one does a pid mean the same process."""
    note: Text = ""
    """What the ranks tell each other besides."""

    @staticmethod
    def of_this_process(rank: int, world_size: int, note: str = "") -> Claim:
        born = procfs.start_ticks("self")
        return Claim(rank, world_size, socket.gethostname(), os.getpid(), born, _machine(), note)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def has_died(self) -> bool:
        """Known for certain only where its pid means anything to us."""
        return self.machine == _machine() and procfs.start_ticks(self.pid) != self.born


def _machine() -> str:
    return f"{procfs.boot_id()} {procfs.pid_namespace()}".strip() or socket.gethostname()


@dataclass(frozen=True)
class Meeting:
    """A store that all ranks are known to share, with nothing in it but what this world puts there."""

    store: Any
    claims: tuple[Claim, ...]
    hosted_here: bool
    """This process serves the store, so it must leave last."""


def url_of(host: str, port: int) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def open_store(init_method: str, rank: int, world_size: int, up: bool, timeout: float) -> tuple[Any, bool]:
    """The store behind ``tcp://host:port`` or ``file:///path``, and whether this process hosts it."""
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
        return tcp_store.connect(*own, timeout, _tell), False
    if rank == 0 and not up:
        return _serve(url.hostname, port, timeout), True
    return tcp_store.connect(url.hostname, port, timeout, _tell), False


def _file_store(path: str, world_size: int) -> Any:
    from torch.distributed import FileStore

    if not path or not os.path.isdir(os.path.dirname(path)):  # noqa: PTH112, PTH120 (False, also for a name that is too long)
        raise UsageError(f"the file {path!r} of init_method lies in no existing directory; make that first.")
    return FileStore(path, world_size)


def _serve(host: str, port: int, timeout: float) -> Any:
    from torch.distributed import DistError

    try:
        with contextlib.closing(ports.listen(_address_to_serve(host), port)) as listener:
            return tcp_store.serve(host, listener, timeout)
    except errors.LaunchError as error:
        raise JoinError(f"rank 0 cannot serve {host}:{port}: {error}") from None
    except DistError as error:
        raise MasterUnreachable(f"rank 0 serves {host}:{port} and cannot reach it: {_first_line(error)}") from None


def _address_to_serve(host: str) -> str:
    """A loopback master is for this machine alone; any other name may stand for several addresses."""
    if host in ("localhost", "::1") or host.startswith("127."):
        return ports.LOOPBACK if host == "localhost" else host
    return "::" if ":" in host else "0.0.0.0"


def wait_for(store: Any, key: str, seconds: float) -> bool:
    """Whether the key was there within that time. Losing the store is an error; a timeout is none.

    Not by the store's own wait: no signal interrupts that, and each one that ends without the key is two lines of
    warnings from torch on standard error.
    """
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while not store.check([key]):
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.3, _LONGEST_PAUSE)
    return True


def meet(store: Any, rank: int, world_size: int, timeout: float, hosted_here: bool) -> Meeting:
    """A place in the store for this world alone, where all ranks have signed."""
    from torch.distributed import PrefixStore

    # A process may join, leave and join again; all do so equally often, so the number keeps the worlds apart.
    own = PrefixStore(f"phalanx/world-{next(_joins)}", store)
    return Meeting(own, sign_in(PrefixStore("join", own), rank, world_size, timeout, hosted_here), hosted_here)


def sign_in(
    store: Any, rank: int, world_size: int, timeout: float, hosted_here: bool = False, note: str = ""
) -> tuple[Claim, ...]:
    """Every rank is there, once, with the same world size; otherwise an error that names who is wrong."""
    book = _Book(store, Claim.of_this_process(rank, world_size, note))
    try:
        book.sign()
        verdict = book.await_verdict(timeout)
        if verdict.error is not None:
            if hosted_here:
                book.linger()
            raise _KINDS.get(verdict.error, JoinError)(verdict.text)
        return book.claims()
    except RuntimeError as error:
        if isinstance(error, errors.PhalanxError):
            raise
        raise JoinError(f"rank {rank} lost the store while joining: {_first_line(error)}") from None


def say_goodbye(meeting: Meeting, size: int) -> None:
    """A rank that hosts the store leaves last, or the others could lose it in the middle of their last words."""
    if meeting.store.add("phalanx/left", 1) == size:
        meeting.store.set("phalanx/all left", "yes")
    if meeting.hosted_here:
        wait_for(meeting.store, "phalanx/all left", _LEAVE_TIMEOUT)


class _Verdict(Record, frozen=True):
    """On all ranks; without an error they belong together."""

    error: Name | None = None
    """The name of one of `_KINDS`."""
    text: Text = ""


_KINDS = {kind.__name__: kind for kind in (JoinError, RanksDisagree, StaleStore)}
_STORE = "the store where the ranks meet"


def _claim(data: bytes) -> Claim:
    return messages.decode(data, Claim, _STORE)


class _Book:
    """The page of the store where the ranks sign. Whoever finds a fault writes the verdict for all."""

    def __init__(self, store: Any, claim: Claim) -> None:
        self._store = store
        self._claim = claim

    def sign(self) -> None:
        mine = self._claim
        if self._store.add(f"taken/{mine.rank}", 1) > 1:
            self._twice()
            return
        self._store.set(f"claim/{mine.rank}", messages.encode(mine))
        first = self._store.compare_set("first", "", messages.encode(mine))
        other = _claim(first)
        if other.world_size != mine.world_size:
            self._rule(
                RanksDisagree,
                f"{mine} was given world size {mine.world_size}, but {other} was given {other.world_size}; "
                "start all of them with the same.",
            )
        elif self._store.add("arrived", 1) == mine.world_size:
            dead = [claim for claim in self.claims() if claim.has_died]
            if dead:
                self._rule(StaleStore, f"the store remembers {dead[0]}, which has ended: it is left over. {_REMOVE}")
            else:
                self._store.set("verdict", messages.encode(_Verdict()))

    def _twice(self) -> None:
        mine = self._claim
        wait_for(self._store, f"claim/{mine.rank}", _SLICE)
        other = _claim(self._store.get(f"claim/{mine.rank}"))
        if other.has_died:
            text = f"the store remembers {other}, which has ended: it is left over from an earlier run. {_REMOVE}"
            raise StaleStore(text)
        self._rule(RanksDisagree, f"two processes claim one rank: {other} and pid {mine.pid} on {mine.host}.")

    def _rule(self, kind: type[JoinError], text: str) -> None:
        self._store.set("verdict", messages.encode(_Verdict(kind.__name__, text)))

    def await_verdict(self, timeout: float) -> _Verdict:
        started = time.monotonic()
        told = started + _FIRST_WORD
        while not self._store.check(["verdict"]):
            now = time.monotonic()
            left = started + timeout - now
            if left <= 0:
                self._rule(JoinError, self._missing_text(timeout))
                break
            if now >= told:
                told = now + _FIRST_WORD
                _tell(f"{self._claim} {self._missing_text(now - started)}")
            wait_for(self._store, "verdict", min(left, _SLICE, told - now))
        return messages.decode(self._store.get("verdict"), _Verdict, _STORE)

    def _missing_text(self, waited: float) -> str:
        size = self._claim.world_size
        missing = [rank for rank in range(size) if not self._store.check([f"claim/{rank}"])]
        names = ", ".join(map(str, missing[:16])) + (" …" if len(missing) > 16 else "")
        return f"waited {waited:.0f} s for {len(missing)} of {size} ranks that have not come: {names}"

    def claims(self) -> tuple[Claim, ...]:
        size = self._claim.world_size
        return tuple(_claim(self._store.get(f"claim/{rank}")) for rank in range(size))

    def linger(self) -> None:
        """The host of the store stays a moment, so that the others can read the verdict."""
        wait_for(self._store, "everyone has read this", 1.0)


_REMOVE = "Remove the file, or give another one."


def _tell(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
