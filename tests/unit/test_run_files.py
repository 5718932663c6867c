"""The files of a run directory are opened safely, whoever can write around them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from phalanx import events, run_files
from phalanx.diagnose import run_directory
from phalanx.errors import LaunchError


def test_files_are_not_opened_through_links(tmp_path: Path) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    run.mkdir()
    precious.write_text("mine")
    for name in ("rank-0.log", "attempt_0"):
        (run / name).symlink_to(precious)
    (tmp_path / "link").symlink_to(run)
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for path, directory in (
        (run / "rank-0.log", None),
        (run / "attempt_0" / "0" / "stdout.log", run),
        (tmp_path / "link" / "other", None),
    ):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            run_files.open_file(path, write, directory)
    fd = run_files.open_file(run / "attempt_1" / "0" / "stdout.log", write, run)
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    os.close(fd)
    assert stat.S_IMODE((run / "attempt_1").stat().st_mode) == 0o700
    events.write_record(run / "rank-0.log", {"a": 1})  # in place of the link
    assert precious.read_text() == "mine"
    assert sorted(path.name for path in run.iterdir()) == ["attempt_0", "attempt_1", "rank-0.log"]


def test_readers_wait_for_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"plain file|director"):
            run_files.read(path)


def test_latest_leads_nowhere_else(tmp_path: Path) -> None:
    """In a directory that is open to all, anybody may have made it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / events.RUN_FILE).write_text("{}")
    base = tmp_path / "runs"
    own = run_files.new_run_directory(base, "20260101-000000-1")
    (own / events.RUN_FILE).write_text("{}")
    assert run_directory.find_run(str(base)) == own
    (base / "latest").unlink()
    (base / "latest").symlink_to(elsewhere)
    assert run_directory.find_run(str(base)) == own


def test_a_directory_of_runs_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(LaunchError, match=r"cannot write the run directory .*: File exists\. Give another directory"):
        run_files.new_run_directory(tmp_path / "runs", "x")
