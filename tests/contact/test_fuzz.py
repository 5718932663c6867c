"""Random command lines and API calls: whatever is wrong is a sentence, nothing hangs, and nothing is left begun.

`make test` takes 30 command lines, `make contact` (CONTACT=full) 300 and 100 API calls. FUZZ_SEED gives other ones.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from phalanx import cli
from phalanx.bench import commands
from phalanx.launch import command as launch_command
from phalanx.launch.remote import conductor
from tests.contact import api_calls, command_lines
from tests.contact.command_lines import Line

FULL = os.environ.get("CONTACT") == "full"
SEED = int(os.environ.get("FUZZ_SEED", "1"))
LONGEST = 20
"""Seconds for one line; hardly any takes one."""


class WouldStart(BaseException):
    """The line was accepted, and processes would be started now."""


@pytest.fixture
def stops_before_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def start(*_: Any, **__: Any) -> None:
        raise WouldStart

    def too_long(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still busy after {LONGEST} s")

    monkeypatch.setattr(launch_command, "ZygoteClient", start)
    monkeypatch.setattr(conductor, "_Conductor", start)
    monkeypatch.setattr(commands, "run_until_interrupted", lambda _: 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    handler = signal.signal(signal.SIGALRM, too_long)
    yield
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def answer(line: Line, capfd: pytest.CaptureFixture[str]) -> str | None:
    """Why this is no good answer to a command line; None when it is one, and WouldStart when it is accepted."""
    code: object = None
    signal.alarm(LONGEST)
    try:
        cli.main(line.words)
    except SystemExit as ended:
        code = ended.code
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (whatever it is, it is the finding)
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
        out, err = capfd.readouterr()
    if "Traceback" in err + out:
        return err[-500:]
    if code == 2 and not (
        err.startswith("phalanx: ") and err.count("\n") <= 2 + sum(word.count("\n") for word in line.words)
    ):
        return f"exit code 2 with {err[:300]!r}"
    return None if code in (0, 1, 2) else f"exit code {code}"


@pytest.mark.usefixtures("stops_before_the_start")
def test_command_lines(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, record_property
) -> None:
    """Random command lines; some of those that are accepted are started."""
    command_lines.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    accepted: list[Line] = []
    lines = command_lines.make(SEED, 300 if FULL else 30)
    for line in lines:
        with monkeypatch.context() as patch:
            for name, value in line.environ.items():
                patch.setenv(name, value)
            try:
                problem = answer(line, capfd)
            except WouldStart:
                accepted.append(line)
                continue
        if problem is not None:
            found.append(f"{line}\n    {problem}")
    startable = [line for line in accepted if is_startable(line)][: 30 if FULL else 4]
    start_for_real(startable, tmp_path, found)
    counts = f"{len(lines)} lines, {len(accepted)} accepted, {len(startable)} started, {len(found)} wrong answers"
    record_property("result", counts)
    with capfd.disabled():
        print(f"\nFUZZ_SEED={SEED}: {counts}")
    assert startable
    assert not found, "\n".join(found)


def is_startable(line: Line) -> bool:
    """Several machines that are not there would be waited for."""
    words = [word.lower() for word in (*line.words, *line.environ)]
    return not any("nnodes" in word or "host" in word or word == "-h" for word in words)


def start_for_real(lines: list[Line], directory: Path, found: list[str]) -> None:
    """As a user would, with a script that ends at once."""
    for line in lines:
        environ = {**os.environ, "PET_START_METHOD": "exec", **line.environ}
        command = [sys.executable, "-m", "phalanx", *line.words]
        try:
            ended = subprocess.run(
                command, cwd=directory, env=environ, capture_output=True, timeout=60, errors="replace"
            )
        except subprocess.TimeoutExpired:
            found.append(f"{line}\n    still running after 60 s")
            continue
        if ended.returncode not in (0, 1, 2, 3) or ("phalanx/" in ended.stderr and "Traceback" in ended.stderr):
            found.append(f"{line}\n    exit code {ended.returncode}: {ended.stderr[-600:]}")


def test_api_calls(run_ranks: Callable[..., list[Any]], tmp_path: Path, record_property) -> None:
    """Random calls of the Python API."""
    ((count, found),) = run_ranks(
        api_calls.make, 1, SEED, 100 if FULL else 20, str(tmp_path), join_group=False, timeout=300
    )
    record_property("result", f"{count} calls, {len(found)} wrong answers")
    assert not found, "\n".join(found)
