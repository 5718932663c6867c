"""Plain data from outside: what fits a type, and what is refused; the seals of a run."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from phalanx import events, plain, run_files, secret
from phalanx.errors import ForeignData, LaunchError


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    size: float | None = None


@dataclasses.dataclass(frozen=True)
class Whole:
    kind: Literal["a", "b"]
    count: int
    parts: tuple[Part, ...]
    pairs: Mapping[int, tuple[str, bool]]
    rest: Any = None


WHOLE = Whole("b", 3, (Part("x", 1.5), Part("y")), {7: ("z", True)}, {"any": [1, None]})


def test_what_was_written_is_read() -> None:
    assert plain.decode(json.dumps(dataclasses.asdict(WHOLE)), Whole, "here") == WHOLE
    assert plain.decode("[1, null]", list[int | None], "here") == [1, None]
    assert plain.decode("3", float | None, "here") == 3.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "c"}, "'c' where"),
        ({"count": True}, "True where int belongs"),
        ({"count": 1.0}, "1.0 where int belongs"),
        ({"parts": {"name": "x"}}, "where list belongs"),
        ({"parts": [{"name": 1}]}, "1 where str belongs"),
        ({"parts": [{}]}, "Part without name"),
        ({"pairs": {"x": ["z", True]}}, "invalid literal"),
        ({"pairs": {"7": ["z"]}}, "1 items where 2 belong"),
        ({"__class__": "x"}, "Whole with '__class__'"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], why: str) -> None:
    fields = {**dataclasses.asdict(WHOLE), **change}
    with pytest.raises(
        ForeignData, match=r"^the store holds what phalanx did not write there \(.*\); somebody"
    ) as caught:
        plain.decode(json.dumps(fields), Whole, "the store")
    assert why in str(caught.value)


@pytest.mark.parametrize("data", [b"\x80\x04.", b"", b"[" * 100_000, b"{" * 10, b"9" * 10_000, b"\xff"])
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(ForeignData):
        plain.decode(data, Whole, "the store")


def test_only_the_same_secret_seals_alike() -> None:
    before = secret.text()
    try:
        secret.keep("01" * 32)
        one = secret.seal(b"message")
        assert len(one) == secret.SEAL_CHARACTERS
        assert secret.is_sealed(b"message", one)
        assert not secret.is_sealed(b"massage", one)
        assert not secret.is_sealed(b"message", b"")
        secret.keep("02" * 32)
        assert not secret.is_sealed(b"message", one)
    finally:
        secret.keep(before)


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
    own = events.new_run_directory(base, "20260101-000000-1")
    (own / events.RUN_FILE).write_text("{}")
    assert events.find_run(str(base)) == own
    (base / "latest").unlink()
    (base / "latest").symlink_to(elsewhere)
    assert events.find_run(str(base)) == own


def test_a_directory_of_runs_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(LaunchError, match=r"cannot write the run directory .*: File exists\. Give another place"):
        events.new_run_directory(tmp_path / "runs", "x")
