"""`phalanx inspect`: from records of ranks to rows, a table and a last line; runs that cannot be found."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from phalanx import cli, events, messages, run_files
from phalanx.devices import gpu_state
from phalanx.diagnose import inspect_command, rank_table
from phalanx.diagnose.inspect_command import View
from phalanx.diagnose.rank_table import RankSample, Row, row
from phalanx.events import HangRecord, ReportFile, RunFile
from phalanx.status import layout
from phalanx.status.page import StatusPage
from phalanx.status.reading import CodeLine, Collective, Status
from phalanx.status.stack_parser import Thread
from phalanx.status.windows import Window
from phalanx.system.procfs import ProcessFacts
from tests.unit.test_devices import fake_nvml

NOW = 1_000_000.0
WAITS = Collective(
    *("0", 12, "all_reduce", "float32", 110, None, "running", NOW - 30, NOW - 30, None),
    CodeLine("/home/ada/train.py", 33, "train"),
)
OWN = ProcessFacts(4711, "S", 1, 0, 1.0, 1, 7, 312 << 20, 0.0, swapped=0, queued=0.0, moved=0)


def seconds(**given: float) -> dict[str, float]:
    return {phase: given.get(phase, 0.0) for phase in layout.PHASES}


def look(at: float = NOW, rank: int = 0, is_alive: bool = True, cpu: float = 0.0, **fields: object) -> RankSample:
    plain = Status(
        *(4711 + rank, rank, 3, NOW - 100, "forward", at, 0, 0, 0, 0, 0, 0, 0.0, seconds(), (), ()),
        blocked=seconds(),
    )
    return RankSample(at, messages.replace(plain, **fields), OWN if is_alive else None, cpu)


def test_shares_and_paces_are_of_the_time_between_two_looks() -> None:
    before = look(
        updates=100,
        seconds=seconds(started=40, data=10, forward=20, backward=30),
        blocked=seconds(backward=15),
    )
    after = look(
        *(NOW + 2, 0, True, 0.5),
        phase="backward",
        since=NOW + 1.8,
        updates=140,
        beats=9,
        seconds=seconds(started=40, data=10.2, forward=20.8, backward=30.8),
        blocked=seconds(backward=15.3),
        blocked_since=NOW + 1.9,
    )
    found = row(before, after)
    assert (found.data, found.compute, found.wait) == pytest.approx((0.1, 0.7, 0.2))
    assert (found.pace, found.cpu, found.seconds, found.waiting) == pytest.approx((20.0, 0.25, 0.2, 0.1))
    assert found.has_moved
    since_start = row(after, after)
    assert (since_start.data, since_start.wait) == pytest.approx((10.2 / 62, 15.4 / 62))
    assert since_start.pace == pytest.approx(140 / 102)
    assert since_start.cpu is None
    assert not since_start.has_moved


def test_a_rank_that_has_ended_or_has_not_been_in_its_loop() -> None:
    ended = dataclasses.replace(
        look(is_alive=False, updates=50, since=NOW - 50, seconds=seconds(data=10)), ended="SIGKILL"
    )
    found = row(ended, ended)
    assert (found.is_alive, found.ended, found.seconds, found.pace, found.resident) == (False, "SIGKILL", 0, 1.0, None)
    started = row(look(phase="started"), look(NOW + 1, phase="started"))
    assert (started.data, started.compute, started.wait, started.pace) == (None, None, None, None)
    # Started again between the two looks: what it was before is nobody's concern.
    assert row(look(updates=900), look(NOW + 1, pid=1, updates=5, started_at=NOW)).pace == pytest.approx(5.0)


def rows(*given: RankSample) -> list[Row]:
    return [row(dataclasses.replace(one, at=one.at - 1), one) for one in given]


def test_who_waits_for_whom_when_nobody_moves() -> None:
    waiting = {"collectives": (WAITS,), "phase": "backward", "blocked_since": NOW - 30, "groups": ()}
    still = rows(look(rank=0, **waiting), look(rank=1, phase="data", since=NOW - 40), look(rank=2, **waiting))
    text = rank_table.conclusion(still, {}, 1.0)
    assert text == (
        "no rank has made progress within 1 s: ranks 0, 2 wait in all_reduce #12 for rank 1 (in data for 40.0 s)"
    )
    everyone = rows(*(look(rank=rank, **waiting) for rank in range(3)))
    assert rank_table.conclusion(everyone, {}, 1.0).endswith("all of them are in all_reduce #12")
    other = messages.replace(WAITS, number=13, op="broadcast")
    apart = rows(look(rank=0, **waiting), look(rank=1, **{**waiting, "collectives": (other,)}))
    assert rank_table.conclusion(apart, {}, 1.0).endswith("in different collectives, all_reduce #12, broadcast #13")
    assert rank_table.conclusion(rows(look(rank=0)), {}, 2.0) == (
        "no rank has made progress within 2 s, and none waits for another"
    )
    stopped = dataclasses.replace(look(rank=1), process=dataclasses.replace(OWN, state="T"))
    assert rank_table.conclusion(rows(look(rank=0, **waiting), stopped), {}, 1.0).endswith(
        "waits in all_reduce #12 for rank 1 (stopped by a signal in forward; kill -CONT 4712 resumes it)"
    )
    assert rank_table._cells(row(stopped, stopped))[3] == "stopped"
    assert rank_table.long_waits(still) == [
        "ranks 0, 2 wait since 30.0 s in all_reduce #12, 110 × float32, /home/ada/train.py:33"
    ]


def test_the_slowest_when_they_move() -> None:
    moving = [dataclasses.replace(one, has_moved=True) for one in rows(look(rank=0), look(rank=1), look(rank=2))]

    def windows(slow: float) -> dict[int, list[Window]]:
        return {rank: [Window(20, {"data": 0.05, "forward": 0.2 + slow * (rank == 1)})] for rank in range(3)}

    assert rank_table.conclusion(moving, windows(0.1), 1.0) == (
        "slowest: rank 1, by 40 % (own work 35 ms a step against 25 ms), in forward"
    )
    assert rank_table.conclusion(moving, windows(0.005), 1.0) == "all ranks are about as fast: 25 ms of own work a step"
    assert "before all have made 20 steps" in rank_table.conclusion(moving, {}, 1.0)
    assert rank_table.conclusion(moving[:1], {}, 1.0) == ""


def test_the_table_fits_on_a_hundred_columns() -> None:
    long = messages.replace(WAITS, op="monitored_barrier", number=123456789)
    wide = look(
        *(NOW + 1, 1023, True, 12.5),
        pid=4194303,
        epoch=999,
        step=1234567,
        updates=10**7,
        phase="checkpoint",
        since=NOW - 5000,
        collectives=(long,),
        seconds=seconds(data=10, forward=10),
    )
    table = rank_table.table([row(look(rank=1023, pid=4194303), wide), row(look(), look())])
    assert max(map(len, table)) <= 100
    assert table[0].split() == ["rank", "pid", "step", "phase", "steps/s", *"data compute wait CPU memory in".split()]
    assert table[1].split()[:4] == ["1023", "4194303", "999/1234567", "checkpoint"]
    assert table[1].endswith("monito"), "what has no room is cut off"


def test_what_is_said_of_a_run_on_several_nodes_and_of_one_that_has_ended() -> None:
    view = View("runs/1", "a", True, True, None, 62.0, 1.0, 4, tuple(rows(look(rank=0), look(rank=1))), "")
    assert inspect_command.lines(view)[0] == "runs/1 on host a, running for 62.0 s; shares and paces of the last 1 s"
    assert inspect_command.lines(view)[-1].startswith("2 of 4 ranks (2, 3) are on other nodes")
    ended = dataclasses.replace(view, is_running=False, exit_code=1)
    assert inspect_command.lines(ended)[0] == "runs/1 on host a ended with exit code 1 after 62.0 s; its last state:"
    assert "was killed" in inspect_command.lines(dataclasses.replace(ended, exit_code=None))[0]
    assert "look there" in inspect_command.lines(dataclasses.replace(ended, exit_code=None, is_here=False))[0]
    threads = (Thread((CodeLine("/home/ada/train.py", 7, "train", "x = y"),), is_main=True), Thread((), "loader"))
    stacks = dataclasses.replace(view, stacks={0: threads, 1: ()}, conclusion="so")
    assert inspect_command.lines(stacks)[-4:] == [
        *("rank 0, innermost first:", "  /home/ada/train.py:7 in train: x = y"),
        *("rank 1: its stack is not known", "so"),
    ]
    assert len(view.ranks) == 2
    assert json.loads(messages.indented(view))["ranks"][0]["rank"] == 0


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "20260101-000000-1"
    directory.mkdir(parents=True)
    events.write_record(directory / events.RUN_FILE, RunFile(socket.gethostname(), time.time() - 60))
    return directory


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = -1
    try:
        cli.main(["inspect", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_on_pages_of_the_living_and_the_dead(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """This process plays rank 0; rank 1 was killed, and rank 5 is left from an attempt with more ranks."""
    assert command(capsys)[0] == 2
    earlier = StatusPage(layout.status_path(run_directory, 5), 5, 6)
    earlier._doubles[5] -= 30
    pages = [StatusPage(layout.status_path(run_directory, rank), rank, 3) for rank in range(2)]
    for page in pages:
        page.beat(layout.DATA, 2, 17, 34)
    pages[1]._words[2] = 2**22 + 1  # no process has this pid
    log = run_files.EventLog(run_directory / events.AGENT_EVENTS)
    log.write("exited", rank=1, pid=2**22 + 1, exit_code=None, signal=int(signal.SIGKILL))
    log.close()
    code, out, err = command(capsys, "--seconds", "0.2")
    assert (code, err) == (0, "")
    table = out.splitlines()
    assert table[0].startswith("runs/20260101-000000-1 on host ")
    assert table[2].split()[:4] == ["0", str(os.getpid()), "2/17", "data"]
    assert table[3].split()[:3] == ["1", "SIGKILL", "2/17"]
    assert table[4].startswith("1 of 3 ranks (2) are on other nodes")
    assert table[5] == "no rank has made progress within 0.2 s, and none waits for another"
    threads = (Thread((CodeLine("/home/ada/train.py", 33, "train"),), is_main=True),)
    inspect_command.main(["--stacks", "--seconds", "0"], lambda living, _: dict.fromkeys(living, threads))
    assert "\nrank 0, innermost first:\n" in capsys.readouterr().out
    found = json.loads(command(capsys, "--json", "--seconds", "0", str(run_directory))[1])
    assert [(one["rank"], one["is_alive"], one["step"]) for one in found["ranks"]] == [(0, True, 17), (1, False, 17)]
    pages[0]._words[6] -= 1  # its pid is another process's by now
    found = json.loads(command(capsys, "--json", "--seconds", "0", str(run_directory))[1])
    assert [one["is_alive"] for one in found["ranks"]] == [False, False]
    events.write_record(run_directory / events.REPORT_FILE, ReportFile(exit_code=137, seconds=12.5))
    assert "ended with exit code 137 after 12.5 s; its last state:" in command(capsys, "--seconds", "0")[1]
    report = ReportFile(exit_code=1, seconds=12.5, hang=HangRecord("a hang: rank 1 sleeps at train.py:3"))
    events.write_record(run_directory / events.REPORT_FILE, report)
    assert command(capsys, "--seconds", "0")[1].endswith("\na hang: rank 1 sleeps at train.py:3\n")


def test_the_gpu_of_a_rank(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process plays rank 0, on the first GPU; of rank 1 nothing is known, and the host's clock tells nothing."""
    (tmp_path / "pid").write_text(str(os.getpid()))
    monkeypatch.setenv("FAKE_NVML_PID", str(tmp_path / "pid"))
    read = functools.partial(gpu_state.read, library=fake_nvml(tmp_path))
    pages = [StatusPage(layout.status_path(run_directory, rank), rank, 2) for rank in range(2)]
    pages[1]._words[2] = 2**22 + 1
    monkeypatch.setattr(gpu_state, "read", lambda: pytest.fail("a run without an accelerator asks no driver"))
    assert "H100" not in command(capsys, "--seconds", "0")[1]
    monkeypatch.setattr(gpu_state, "read", read)
    for page in pages:
        page.enter(layout.FORWARD)
        page.device_is(layout.UNKNOWN)
    told = command(capsys, "--seconds", "0")[1].splitlines()
    assert told[2].split()[4:8] == ["–", "–", "–", "–"]
    assert told[-2] == (
        "rank 0: Fake H100: 60.0 of 80.0 GiB, 100 % busy, 120 of 700 W, 40 °C, "
        "busy at little power: it may be waiting in NCCL"
    )
    assert told[-1] == "the slowest rank is not known before all have made 20 steps (on GPUs, with DDP)"
    pages[0].device_stepped(10, 1.0, 2.5, 0.5)
    told = command(capsys, "--seconds", "0")[1].splitlines()
    assert told[2].split()[5:11] == ["12", "%", "25", "%", "62", "%"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/none"], "does not exist"),
        (["."], "has no run.json"),
        (["--seconds", "x"], "'x' is not a number of seconds from 0 to 3600; give one like 5"),
    ],
)
def test_mistakes(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
