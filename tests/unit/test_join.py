"""Waiting for a key of a store: in time, without a word, and to be interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from torch.distributed import HashStore

from phalanx.store.join import wait_for


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_a_key_that_does_not_come_is_not_a_word_of_torchs() -> None:
    """Its own wait prints two lines of warnings for each timeout."""
    code = """
        import time
        from torch.distributed import TCPStore
        from phalanx.store.join import wait_for
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
