"""Shared by all tests: running the command line for real, and the leak police."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TypeVar

import pytest

from phalanx import torch_compat
from phalanx.testing import ranks as testing

REPOSITORY = Path(__file__).parents[1]
_Case = TypeVar("_Case")
_MARK = f"PHALANX_TEST={uuid.uuid4().hex}"


# Files of tests with limits of about a second. `make test` runs those one after the other, and the rest beside each
# other. Tests of these files that have no such limit are marked `beside_others`; tests of other files that have one,
# `alone`.
_ALONE = ("faults/test_faults.py", "faults/test_shm", "faults/test_stalls.py", "faults/test_stragglers.py")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> Generator[None, None, None]:
    for item in items:
        path = item.path.relative_to(REPOSITORY / "tests").as_posix()
        if path.startswith(_ALONE) and item.get_closest_marker("beside_others") is None:
            item.add_marker("alone")
        if "/test_shm" in path and (reason := torch_compat.why_no_shm()):
            item.add_marker(pytest.mark.skip(reason=reason))
    yield  # here -m takes out those that are not asked for
    items[:] = _long_ones_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def _long_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each worker gets as many items in a row, and begins with some that take tens of seconds.

    One that began last would be waited for with the other cores idle.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    share = -(-len(items) // workers)
    parts = [long[worker::workers] for worker in range(workers)]
    return [item for part in parts for item in (*part, *islice(others, share - len(part)))]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m alone`, files that have no such test are not even imported."""
    if config.option.markexpr != "alone" or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(REPOSITORY / "tests").as_posix()
    return None if path.startswith(_ALONE) or "mark.alone" in collection_path.read_text() else True


def pytest_configure(config: pytest.Config) -> None:
    """Not when this file is imported: the ranks of a test import it too, with the test's module."""
    config.addinivalue_line("markers", "alone: has limits of time, so nothing else should run beside it")
    config.addinivalue_line("markers", "beside_others: has no limits of time, although most tests of its file do")
    config.addinivalue_line("markers", "long: takes tens of seconds, so it is started first")
    if "PYTEST_XDIST_WORKER" in os.environ:
        global _is_shared_memory_ours
        _is_shared_memory_ours = _have_shared_memory_of_our_own()
    # multiprocessing's helper, which lives as long as the session; started here so that no test is blamed for it.
    resource_tracker.ensure_running()
    os.environ["PHALANX_TEST"] = _MARK.partition("=")[2]
    # Nothing of the machine that runs the tests may reach into them.
    for name in list(os.environ):
        # The last but one would have every process that a test starts compile all that it imports.
        own = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "PET_", "TORCHELASTIC_")) or name in own:
            del os.environ[name]
    # A thread of OpenMP that waits spins by default. Tests share the cores, so most of their time would go into that.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # A shell may have started this session with Ctrl-C ignored, which every process below would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def told(self) -> list[str]:
        return told(self.err)

    @property
    def complaint(self) -> list[str]:
        """What phalanx said at the end: from its last `phalanx:` line on."""
        lines = self.err.splitlines()
        starts = [index for index, line in enumerate(lines) if line.startswith("phalanx: ")]
        return lines[starts[-1] :] if starts else []


def told(err: str) -> list[str]:
    """What was said on standard error, but for the line about the backend that a script on CPUs gets."""
    lines = ("phalanx: the backend is shm, not gloo", "phalanx: the backend is gloo: shm needs torch")
    return [line for line in err.splitlines() if not any(text in line for text in lines)]


def by_rank(outcome: Outcome) -> dict[int, list[str]]:
    """What each rank printed, from lines like ``[rank 1] text``."""
    found: dict[int, list[str]] = {}
    for line in outcome.lines:
        matched = re.fullmatch(r"\[rank +(\d+)\] (.*)", line)
        assert matched, line
        found.setdefault(int(matched[1]), []).append(matched[2])
    return found


def read_terminal(primary: int) -> bytes:
    """Everything that is written to the other side of a terminal, until nobody has it open; closes this side."""
    seen = b""
    with contextlib.suppress(OSError):  # the terminal's way to say that
        while True:
            seen += os.read(primary, 4096)
    os.close(primary)
    return seen


Runner = Callable[..., Outcome]


def first(few: int, cases: list[_Case]) -> list[_Case]:
    """The first few of the cases; `make contact` (CONTACT=full) runs all of them."""
    return cases if os.environ.get("CONTACT") == "full" else cases[:few]


WITHOUT_TORCH = ("--start-method", "exec")
"""For a run whose script needs no torch: no process imports it, and the run takes a quarter of the time."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(*arguments: str, cwd: Path, env: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """A command of this Python, in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, **(env or {})}, **{**pipes, **options}
    )


@pytest.fixture
def phalanx(tmp_path: Path) -> Runner:
    """Runs ``phalanx …`` in the test's own directory."""

    def run(*arguments: str, env: dict[str, str] | None = None, timeout: float = 60, **options) -> Outcome:
        started = time.monotonic()
        options = {"text": False, **options}
        with start("-m", "phalanx", *arguments, cwd=tmp_path, env=env, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        # Decoded by hand: a carriage return must stay one.
        return Outcome(process.returncode, (out or b"").decode(), (err or b"").decode(), time.monotonic() - started)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """Writes a script into the test's directory and returns its name."""

    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    return write


@pytest.fixture
def latest(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "latest"


_is_shared_memory_ours = True


def _have_shared_memory_of_our_own() -> bool:
    """Of two processes that run tests, each would find in /dev/shm what the other's tests have there. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, everywhere = 0x20000, 1 << 18, 1 << 14
    for failed in (
        libc.unshare(new_mounts),
        libc.mount(b"none", b"/", None, private | everywhere, None),
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777"),
    ):
        if failed:
            return False
    return True


def marked_processes() -> set[int]:
    """Every process that descends from this test session, whoever its parent is by now. A zombie has no variables."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:  # it may end meanwhile
            if _MARK.encode() in environ.read().split(b"\0"):
                found.add(int(pid))
    return found


def _is_helper(pid: int) -> bool:
    """The helper of `run_ranks` stays between tests, on purpose."""
    if testing._warm is None:
        return False
    with contextlib.suppress(OSError):  # it may end meanwhile
        while pid not in (0, testing._warm._process.pid):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == testing._warm._process.pid


_NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets the second with its first optimizer


def _belongings() -> dict[str, set]:
    descriptors = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
    return {
        "processes": {pid for pid in marked_processes() if not _is_helper(pid)},
        "threads": {thread.name for thread in threading.enumerate()},
        "descriptors": {f"{fd} {what}" for fd, what in descriptors.items() if "/proc/" not in what},
        "shared memory": set(os.listdir("/dev/shm")) if _is_shared_memory_ours else set(),
        "environment": {f"{k}={v}" for k, v in os.environ.items() if k not in _NOT_OURS},
    }


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that leaves a process, thread, descriptor, segment or variable behind has failed."""
    uses_helper = "run_ranks" in request.fixturenames
    if uses_helper:
        testing._warm_zygote()
    before = _belongings()
    yield
    deadline = time.monotonic() + 1.0
    while True:
        after = _belongings()
        left = {kind: after[kind] - before[kind] for kind in after if after[kind] - before[kind]}
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for pid in left.get("processes", ()):
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left over: {left}"


@pytest.fixture
def run_ranks() -> Callable[..., list]:
    def run(*args, **options) -> list:
        if options.get("backend") == "shm" and (reason := torch_compat.why_no_shm()):
            pytest.skip(reason)
        return testing.run_ranks(*args, **options)

    return run


@pytest.fixture(scope="session", autouse=True)
def end_helper() -> Iterator[None]:
    yield
    testing.close()
