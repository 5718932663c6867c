"""One command at a time: started, watched, measured, and ended with everything it has started."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.errors import PhalanxError
from phalanx.launch.process import process_tree

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SHOWN_LINES = 40  # torchrun prints twenty about itself, after the traceback


class CommandFailed(PhalanxError):
    """A measured command did not do what it was started for; the message ends with the last lines it printed."""

    def __init__(self, command: str, how: str, output: str) -> None:
        super().__init__(f"`{command}` {how}. It printed at the end:{output}")
        self.how = how


class Interrupted(BaseException):
    """A signal ended the benchmark. Not an Exception, so that nothing on the way takes it for an error."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """The first signal unwinds the benchmark; later ones are not heard, for the cleaning up must come to its end."""

    def stop(number: int, _: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def running(argv: Sequence[str], directory: Path, timeout: float) -> Iterator[Running]:
    """Starts ``argv`` in ``directory``; at the end of the block nothing of it is left.

    Launchers put their workers into sessions of their own, so a process group is not enough to find them. This
    process adopts them if their parents die, which keeps all of them below it.
    """
    process_tree.adopt_orphans()
    others = _below()
    try:
        yield Running(argv, directory, timeout, others)
    finally:
        process_tree.end_all(lambda: _below() - others)


def _below() -> frozenset[int]:
    """Every process below this one, zombies too: one of several threads becomes a zombie while it still has children,
    which would be missed without it."""
    import psutil

    return frozenset(process.pid for process in psutil.Process().children(recursive=True))


class Running:
    """A command under way. Its output goes into a file, of which the end is shown if it fails."""

    def __init__(self, argv: Sequence[str], directory: Path, timeout: float, others: frozenset[int]) -> None:
        self._argv = argv
        self._timeout = timeout
        self._others = others
        self._output = directory / "output"
        with self._output.open("wb") as output:
            self.started = time.time()
            self._process = subprocess.Popen(
                argv,
                cwd=directory,
                env={**os.environ, "TMPDIR": str(directory)},  # what launchers leave in /tmp is removed as well
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C on the terminal is for the benchmark alone
            )

    def finish(self) -> float:
        """Waits for the end and returns the seconds from start to end; a bad end raises CommandFailed."""
        self._wait(None)
        seconds = time.time() - self.started
        code = self._process.wait()
        if code:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise self.failure(how)
        return seconds

    def read(self, fd: int, count: int) -> None:
        """Reads ``count`` bytes from a FIFO that the ranks write to."""
        while count:
            if not self._wait(fd):
                raise self.failure(f"ended with exit code {self._process.wait()} while {count} ranks were awaited")
            count -= len(os.read(fd, count))

    def pss(self) -> tuple[int, int]:
        """Bytes of memory that are the command's fair share (PSS), and the number of processes that hold them.

        A page of libtorch that strangers have mapped too counts only in part, so nothing else with torch should run.
        """
        pids = _below() - self._others
        return sum(_pss(pid) for pid in pids), len(pids)

    def failure(self, how: str) -> CommandFailed:
        lines = self._output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        shown = "".join(f"\n  | {line}" for line in lines) if lines else " nothing."
        return CommandFailed(" ".join(self._argv), how, shown)

    def _wait(self, fd: int | None) -> bool:
        """Until ``fd`` can be read (true) or the command has ended (false); too long raises CommandFailed."""
        # Popen.wait with a timeout polls, with pauses of up to 50 ms; this wakes up at once.
        pidfd = os.pidfd_open(self._process.pid)
        try:
            left = max(0.0, self.started + self._timeout - time.time())
            readable, _, _ = select.select([pidfd] if fd is None else [pidfd, fd], [], [], left)
        finally:
            os.close(pidfd)
        if not readable:
            raise self.failure(f"was still running after {self._timeout:g} s")
        return fd in readable


def _pss(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):  # a zombie holds no memory
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
