"""The store: waiting for a key in time, without a word, and to be interrupted; values of another type."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from torch.distributed import HashStore

from phalanx.errors import CheckpointError, MasterUnreachable, PeerFailed, UsageError
from phalanx.store import tcp_store
from phalanx.store.coordinator import Coordinator
from phalanx.store.primitives import wait_for


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_a_key_that_does_not_come_is_not_a_word_of_torchs() -> None:
    """Its own wait prints two lines of warnings for each timeout."""
    code = """
        import time
        from torch.distributed import TCPStore
        from phalanx.store.primitives import wait_for
        store = TCPStore("127.0.0.1", 0, is_master=True)
        started = time.monotonic()
        assert not wait_for(store, "never", 0.2)
        assert 0.2 <= time.monotonic() - started < 5.0
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_key_that_comes_is_seen_at_once(store: HashStore) -> None:
    timer = threading.Timer(0.1, lambda: store.set("soon", "1"))
    timer.start()
    assert wait_for(store, "soon", 20.0)
    timer.join()


def test_a_signal_interrupts_it(store: HashStore) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError("on purpose")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError):
            wait_for(store, "never", 20.0)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_error_ends_a_wait_unless_the_key_came_first(store: HashStore) -> None:
    """A rank may set the key and end."""
    assert not wait_for(store, "never", 0.1, lambda _: None, look_every=0.01)
    with pytest.raises(PeerFailed, match="rank 1 has died"):
        wait_for(store, "never", 20.0, lambda _: PeerFailed("rank 1 has died"), look_every=0.01)

    def set_and_die(_: float) -> PeerFailed:
        store.set("last", "1")
        return PeerFailed("rank 1 has died")

    assert wait_for(store, "last", 20.0, set_and_die, look_every=0.01)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        ('["", [1, 2]]', None, ""),
        *((found, CheckpointError, "does not hold") for found in ('["", [null]]', '["", ["1"]]', '["", 5]', "5", "x")),
        ('["UsageError", "no"]', UsageError, "no"),
        ('["OSError", "full"]', CheckpointError, "full"),
    ],
)
def test_the_result_of_rank_0_has_its_type(
    store: HashStore, content: str, error: type[Exception] | None, text: str
) -> None:
    follower = Coordinator(store, 1, 2, (), "it was agreed on", CheckpointError)
    store.set("turn 0", content)
    if error is None:
        assert follower.lead(lambda: [0], list[int]) == [1, 2]
        return
    with pytest.raises(error, match=text):
        follower.lead(lambda: [0], list[int])


def test_a_master_whose_name_and_host_appear_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster, names, networks and ports appear one after the other; what cannot pass is raised at once."""
    monkeypatch.setattr(tcp_store, "_FIRST_NOTICE", 0.0)
    monkeypatch.setattr(tcp_store, "_NEXT_NOTICE", 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    name = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    passing = [OSError(number, os.strerror(number)) for number in (errno.EHOSTUNREACH, errno.ENETUNREACH)]
    errors: list[Exception | None] = [name, *passing, ConnectionRefusedError(), None]

    def connect(address: tuple[str, int], timeout: float) -> io.BytesIO:
        error = errors.pop(0)
        if error is not None:
            raise error
        return io.BytesIO()

    monkeypatch.setattr(socket, "create_connection", connect)
    notices: list[str] = []
    tcp_store.await_listener("job-0.job", 29500, 20.0, notices.append)
    assert [notice.partition("s: ")[2] for notice in notices] == [
        "its name cannot be resolved (Name or service not known)",
        "No route to host",
        "Network is unreachable",
        "nobody listens there",
    ]
    errors[:] = [name]
    with pytest.raises(MasterUnreachable, match=r"within 0 s: its name cannot be resolved \(Name or service not known"):
        tcp_store.await_listener("job-0.job", 29500, 0.0, notices.append)
    for error, text in ((UnicodeError(), "it is not a valid host name"), (PermissionError(1, "no"), "no")):
        errors[:] = [error]
        with pytest.raises(MasterUnreachable, match=text):
            tcp_store.await_listener("job-0.job", 29500, 20.0, notices.append)
