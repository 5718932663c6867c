"""Which run is meant, whether it lives, and what its directory tells without a report."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from phalanx import events, messages, run_files
from phalanx.diagnose import report_command, run_directory
from phalanx.errors import UsageError
from phalanx.events import HangRecord, ReportFile, RunFile
from phalanx.launch.output.console import Console
from phalanx.status import layout
from phalanx.status.page import StatusPage


def new_run(base: Path, name: str) -> Path:
    directory = run_files.new_run_directory(base, name)
    command = ("/bin/phalanx", "run", "a b.py")
    order = RunFile("node1", time.time() - 100.0, command=command, directory="/home/ada")
    events.write_record(directory / "run.json", order)
    return directory


def test_which_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no run below runs; give the directory that"):
        run_directory.find_run(None, {})
    first, second = (new_run(tmp_path / "runs", name) for name in ("20260101-1", "20260102-2"))
    assert run_directory.find_run(None, {}).resolve() == second
    assert run_directory.find_run("20260101-1", {}).resolve() == first
    assert run_directory.find_run("runs/20260101-1", {}).resolve() == first
    assert run_directory.find_run("runs", {}).resolve() == second
    assert run_directory.find_run(str(first), {}) == first
    elsewhere = new_run(tmp_path / "logs", "20260103-3")
    assert run_directory.find_run(None, {"PET_LOG_DIR": "logs"}).resolve() == elsewhere
    (tmp_path / "runs/latest").unlink()  # a file system without links
    assert run_directory.find_run(None, {}).resolve() == second
    with pytest.raises(UsageError, match=r"is no run directory: it has no run\.json"):
        run_directory.find_run(str(tmp_path), {})
    with pytest.raises(UsageError, match="nowhere is no run directory: it does not exist"):
        run_directory.find_run("nowhere", {})
    (first / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"run\.json cannot be read: it is no JSON"):
        run_directory.load(first)


def test_a_run_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def exists(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(UsageError, match=r"^/theirs/run.json cannot be read: Permission denied; it belongs to another"):
        run_directory.find_run("/theirs", {})


def test_an_event_file_tells_whether_its_writer_lives(tmp_path: Path) -> None:
    path = tmp_path / "agent.events.jsonl"
    assert not run_directory.is_being_written(path)
    assert run_directory.read_events(path) == []
    log = run_files.EventLog(path)
    log.write("started", rank=0)
    assert run_directory.is_being_written(path)
    assert run_directory.is_being_written(path), "looking changes nothing"
    log.close()
    assert not run_directory.is_being_written(path)
    with path.open("a") as file:
        file.write('{"time": 3, "eve')  # the disk was full
    assert [each["event"] for each in run_directory.read_events(path)] == ["started"]


def test_a_run_without_a_report(tmp_path: Path) -> None:
    directory = new_run(tmp_path, "20260101-1")
    log = run_files.EventLog(directory / events.AGENT_EVENTS)
    log.write("started", rank=3, pid=5)
    log.write("restarting", attempt=1, cause="rank 0 failed: KeyError: 'x' at train.py:6")
    pages = [StatusPage(directory / f"rank-{rank}.status", rank, 3) for rank in range(3)]
    pid = os.getpid()
    for rank in range(3):
        log.write("started", rank=rank, pid=pid if rank < 2 else 77)
    log.write("exited", rank=1, pid=pid, exit_code=None, signal=9)
    pages[0].enter(layout.BACKWARD)
    told = report_command.lines(run_directory.load(directory))
    assert told[0] == "phalanx run 'a b.py'"
    assert told[2] == "  is running, for 1 min 40 s so far, in attempt 2"
    assert told[3] == "  attempt 1: rank 0 failed: KeyError: 'x' at train.py:6"
    assert told[5].startswith(f"rank 0: pid {pid}, in phase backward since ")
    assert told[6:-1] == [f"rank 1: pid {pid}, ended with SIGKILL", "rank 2: pid 77, runs"]
    log.close()
    run = run_directory.load(directory)
    assert (run.state, round(run.seconds)) == ("lost", 100)
    pages[0]._since += 7  # its rank has outlived the launcher by that
    pages[0].tick()
    assert round(run_directory.load(directory).seconds) == 107
    assert " last seen in phase backward since " in report_command.lines(run)[5]
    assert json.loads(messages.indented(report_command._fields(run)))["ranks"][0]["status"]["phase"] == "backward"
    empty = run_directory.load(new_run(tmp_path, "20260102-2"))
    assert "no rank was started" in report_command.lines(empty)


def test_a_run_that_stood_still_says_so_whatever_became_of_it(tmp_path: Path) -> None:
    directory = new_run(tmp_path, "20260101-1")
    log = run_files.EventLog(directory / events.AGENT_EVENTS)
    for verdict in ({"headline": "a hang: rank 1 sleeps"}, {"headline": "a hang: rank 1 sleeps"}, None):
        log.write("stall", verdict=verdict)
    log.write("stall", verdict={"headline": "a hang: rank 0 is stopped"})
    (directory / "stall-1.txt").touch()
    told = report_command.lines(run_directory.load(directory))
    log.close()
    assert told[3:6] == [
        "  stalled after 1 min 40 s (until 1 min 40 s): a hang: rank 1 sleeps",
        "  stalled after 1 min 40 s: a hang: rank 0 is stopped",
        "  all stacks: stall-1.txt there",
    ]


def test_what_we_say_begins_a_line(tmp_path: Path) -> None:
    """A rank that is alone may have left one without an end: a prompt, or what torch writes in a signal's handler."""

    class Rank:
        def drained(self) -> None: ...

    with (tmp_path / "out").open("w+b") as out, (tmp_path / "err").open("w+b") as err:
        console = Console(out.fileno(), err.fileno())
        for text in (b"bus error\n\0", b"and more"):
            console.put(Rank(), err.fileno(), text)
        console.put(Rank(), err.fileno(), b"phalanx: one\n", on_a_new_line=True)
        console.put(Rank(), err.fileno(), b"phalanx: two\n", on_a_new_line=True)
        console.close()
        err.seek(0)
        assert err.read() == b"bus error\n\0and more\nphalanx: one\nphalanx: two\n"


def test_a_hang_and_slow_ranks_are_told_again() -> None:
    lines = ("no rank has made progress for 3 s", "  rank 1 is missing")
    hang = HangRecord("a hang: rank 1 sleeps", lines=lines)
    slow = ({"said": "rank 1 is 40 % slower"},)
    report = ReportFile(exit_code=1, seconds=1.0, hang=hang, said=(hang.headline,), stragglers=slow)
    assert report_command._console_lines(report) == ["", *lines, "", hang.headline, "", "rank 1 is 40 % slower"]
    assert report_command._console_lines(ReportFile(exit_code=0, seconds=1.0)) == []


def test_two_runs_begin_in_an_empty_directory_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", lambda at: [])  # as both have found it
    made = [run_files.new_run_directory(tmp_path / "runs", "one") for _ in range(2)]
    assert [path.name for path in made] == ["one", "one-1"]
    assert (tmp_path / "runs/.gitignore").read_text() == "*\n"


def test_a_directory_that_all_can_write_to_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As volumes of Kubernetes are. What we make ourselves is not like that, whatever the umask."""
    base = tmp_path / "runs"
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        run_files.new_run_directory(base, "one")
    finally:
        os.umask(before)
    assert base.stat().st_mode & 0o777 == 0o755
    for mode in (0o1777, 0o777):
        base.chmod(mode)
        assert run_files.new_run_directory(base, "one").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["run.json", "agent.events.jsonl"])
def test_a_huge_file_is_not_read(name: str, tmp_path: Path) -> None:
    """A sparse one takes no space on the disk of whoever made it."""
    directory = new_run(tmp_path, "one")
    with (directory / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(UsageError, match=f"{name} cannot be read: it is larger than 256 MiB"):
        run_directory.load(directory)
