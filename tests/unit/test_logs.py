"""From pieces of output to lines on one console."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from phalanx.launch.output.console import Console
from phalanx.launch.output.line_splitter import LineSplitter, Tail
from phalanx.launch.output.logs import LogFile, OutputPipe, OutputRoute, rank_prefix


def cut(*pieces: bytes) -> bytes:
    cutter = LineSplitter(b"> ")
    return b"".join(cutter.feed(piece) for piece in pieces) + cutter.finish()


def test_lines_are_whole_however_they_arrive() -> None:
    text = b"".join(b"line %d\n" % number for number in range(300))
    expected = b"".join(b"> line %d\n" % number for number in range(300))
    chance = random.Random(0)
    for _ in range(50):
        pieces, rest = [], text
        while rest:
            size = chance.randint(1, 40)
            pieces.append(rest[:size])
            rest = rest[size:]
        assert cut(*pieces) == expected


def test_the_last_line_without_a_newline_is_not_lost() -> None:
    assert cut(b"a\nb") == b"> a\n> b\n"
    assert cut(b"") == b""


def test_a_progress_bar_shows_its_last_state() -> None:
    assert cut(b"\r 10%", b"\r 50%", b"\r100%\n") == b"> 100%\n"
    assert cut(b" 10%\r 50%\r100%\r", b"\ndone\n") == b"> 100%\n> done\n"
    assert cut(b"dos line\r\nnext\r\n") == b"> dos line\n> next\n"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_bar_with_a_position_is_no_line_for_each_state(size: int) -> None:
    """As tqdm draws it: position lines down, the bar, and up again; closed at position 0, with a newline."""
    outer = [b"\repochs: %d/2" % epoch for epoch in range(3)]
    inner = [b"\n\n\r\x1b[32msteps: %d/9\x1b[0m\x1b[A\x1b[A" % step for step in range(9)]
    cleared = b"\n\n\r            \r\x1b[A\x1b[A"
    written = outer[0] + b"".join(inner) + cleared + outer[1] + b"".join(inner) + b"\rsteps: 9/9\n" + outer[2] + b"\n"
    cutter, tail = LineSplitter(b"[rank 0] "), Tail()
    shown = b""
    for start in range(0, len(written), size):
        shown += cutter.feed(written[start : start + size])
        tail.add(written[start : start + size])
    lines = (shown + cutter.feed(b"done\n") + cutter.finish()).splitlines()
    assert lines[-3:] == [b"[rank 0] steps: 9/9", b"[rank 0] epochs: 2/2", b"[rank 0] done"]
    assert len(lines) <= 5, "the first state may be a line: what follows is not known then"
    assert tail.lines(5) == ("steps: 9/9", "epochs: 2/2")


def test_what_is_unfinished_can_be_shown_live() -> None:
    cutter = LineSplitter(b"> ")
    assert cutter.feed(b"(Pdb) ") == b""
    assert cutter.unfinished() == b"> (Pdb) "
    assert not cutter.is_progress
    cutter.feed(b"\r 5%\r 6%")
    assert (cutter.unfinished(), cutter.is_progress) == (b">  6%", True)


def test_memory_is_bounded_without_newlines() -> None:
    cutter = LineSplitter(b"")
    out = b"".join(cutter.feed(b"x" * 65536) for _ in range(64))
    assert out.replace(b"\n", b"") == b"x" * len(out.replace(b"\n", b""))
    assert len(cutter.unfinished()) <= 1 << 20


def test_prefixes_line_up_and_are_coloured_only_on_request() -> None:
    assert rank_prefix(3, 16, coloured=False) == b"[rank  3] "
    assert rank_prefix(3, 4, coloured=False) == b"[rank 3] "
    assert rank_prefix(1, 2, coloured=True).startswith(b"\x1b[33m[rank 1]\x1b[0m")


def test_tail_keeps_the_last_lines() -> None:
    tail = Tail()
    for number in range(5000):
        tail.add(b"line %d\n" % number)
    tail.add(b"\n50%\r99%")
    assert tail.lines(2) == ("line 4999", "99%")


def test_a_slow_reader_stops_the_loud_rank_and_not_the_quiet_one(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    console = Console(out=writer, err=writer)
    resumed: list[OutputPipe] = []
    complaints: list[str] = []
    logs = [LogFile(tmp_path / f"{name}.log", complaints.append) for name in ("loud", "quiet")]
    loud, quiet = (OutputPipe(OutputRoute([log], Tail(), writer, b""), console, resumed.append) for log in logs)
    written = 0
    while not loud.paused:
        os.write(loud.writer, b"x" * 1023 + b"\n")
        written += 1024
        assert loud.read()
    assert written > 1 << 20
    os.write(quiet.writer, b"hello\n")
    assert quiet.read()
    assert not quiet.paused
    got = b""
    while b"hello\n" not in got or len(got) < written + 6:
        got += os.read(reader, 1 << 20)
    assert console.flush(5.0)
    assert len(got) == written + 6
    assert got.index(b"hello\n") < 3 << 20, "a turn for each: the quiet rank does not wait behind the loud one"
    assert resumed == [loud]
    assert (tmp_path / "loud.log").stat().st_size == written
    console.close()
    for pipe in (loud, quiet):
        pipe.close()
    for log in logs:
        log.close()
    os.close(reader)
    os.close(writer)
    assert not complaints


def test_a_console_that_is_gone_is_no_fault() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    console = Console(out=writer, err=writer)

    class Source:
        def drained(self) -> None:
            pass

    console.put(Source(), writer, b"nobody reads this\n")
    console.close()
    os.close(writer)


def test_a_log_that_cannot_be_opened_does_not_stop_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    log = LogFile(tmp_path / "file" / "rank-0.log", said.append)
    log.write(b"a line\n")
    log.close()
    where = tmp_path / "file" / "rank-0.log"
    assert said == [f"cannot write {where}: File exists. There is no log there; the run continues."]
    log = LogFile(tmp_path / "removed" / "rank-0.log", said.append)  # somebody has cleared up the run directory
    log.write(b"a line\n")
    log.close()
    assert (tmp_path / "removed" / "rank-0.log").read_bytes() == b"a line\n"
    assert len(said) == 1
