"""Runs tests of the suite on one backend, one after the other.

Started by run.py, to which it writes how many there are, and a line of JSON for each. It imports torch and the suite
once. Each test is a fork of it in a session of its own, so that a test that hangs or crashes takes nothing with it,
and all its processes can be killed together.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import unittest
from dataclasses import asdict, dataclass
from typing import IO

_GRACE = 20.0
"""Seconds after the suite's own limit, in which it collects the stacks of the ranks and ends them."""
_KEPT = 6000
"""Characters of what a failed test printed that are kept."""


@dataclass(frozen=True)
class Result:
    """How one test ended."""

    test: str
    outcome: str
    """passed, failed or skipped."""
    reason: str
    seconds: float
    output: str = ""
    """Of a failed test: the exception, and the end of what its ranks printed."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("patterns", nargs="+")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    from tests.suite import harness

    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process of {len(threads)} threads must not be forked; is OMP_NUM_THREADS=1 set?"
    chosen = [name for name in harness.names() if any(fnmatch.fnmatch(name, each) for each in arguments.patterns)]
    print(len(chosen), flush=True)
    for name in chosen:
        skipped = harness.skip_reason(name)
        if skipped is None:
            _say(_run_apart(name, arguments.timeout))
        else:
            _say(Result(name, "skipped", skipped, 0.0))


def _say(result: Result) -> None:
    print(json.dumps(asdict(result)), flush=True)


def _run_apart(name: str, timeout: float) -> Result:
    """Runs a test in a fork of this process, and leaves no process of it."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+b") as printed, tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        pid = os.fork()
        if pid == 0:
            _be_test(name, printed, answer)
        try:
            in_time = _wait(pid, timeout + _GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        seconds = round(time.monotonic() - started, 2)
        printed.seek(0)
        output = printed.read().decode(errors="replace")[-_KEPT:]
        answer.seek(0)
        text = answer.read()
        if not text:
            reason = f"ended with status {status}" if in_time else f"has not ended within {timeout:g} s"
            return Result(name, "failed", reason, seconds, output)
        outcome, reason, details = json.loads(text)
        return Result(name, outcome, reason, seconds, details + output if outcome == "failed" else "")


def _wait(pid: int, seconds: float) -> bool:
    """Whether the process has ended in time."""
    fd = os.pidfd_open(pid)
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def _be_test(name: str, printed: IO[bytes], answer: IO[str]) -> None:
    """In the fork: runs the test, writes how it ended, and never returns."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)
    try:
        from tests.suite import harness

        result = unittest.TestResult()
        unittest.TestSuite([harness.Suite(name)]).run(result)
        sys.stdout.flush()
        json.dump(_outcome(result), answer)
        answer.flush()
    finally:
        os._exit(0)


def _outcome(result: unittest.TestResult) -> tuple[str, str, str]:
    """Outcome, reason, details."""
    for _, text in result.errors + result.failures:
        return "failed", last_exception(text), text
    for _, reason in result.skipped:
        return "skipped", reason, ""
    return "passed", "", ""


def last_exception(text: str) -> str:
    """The line with the last exception of a traceback; torch adds C++ frames to its own, so it is not the last line."""
    lines = text.strip().splitlines()
    return next((line for line in reversed(lines) if re.match(r"[A-Za-z_][\w.]*: ", line)), lines[-1])


if __name__ == "__main__":
    main()
