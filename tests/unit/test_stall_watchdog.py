"""The watch over ranks that stand still, with pages written by hand and processes that do nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx import events, messages
from phalanx.errors import ForeignData
from phalanx.events import HangRecord
from phalanx.launch.agent.rank_process import open_rank
from phalanx.launch.agent.watchdogs import Watchdogs
from phalanx.launch.spec.launch_spec import LaunchSpec, Program, placements
from phalanx.status import layout
from phalanx.status.page import StatusPage
from phalanx.status.rank_record import RankRecord, Vitals
from phalanx.system import procfs
from phalanx.watchdog.exchange import Exchange
from phalanx.watchdog.stall import across_nodes, progress, snapshot, stack_dump, stall_detector
from phalanx.watchdog.stall.across_nodes import StallExchange, StallOver, StallSnapshot, StallVerdict
from phalanx.watchdog.stall.progress import ProgressMonitor
from phalanx.watchdog.stall.stall_detector import StallDetector, Terms
from phalanx.watchdog.stall.threshold import Observation
from phalanx.watchdog.straggler.across_nodes import PaceExchange, PaceReport

STALL_AFTER = 0.5
LONG = 20.0


class Clock:
    """The time, which passes by itself and when it is told to: nobody has to wait for it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def time(self) -> float:
        return time.time() + self.ahead


class Ranks:
    """Two ranks of one node, of which the first waits for the second."""

    clock: Clock

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pages = [StatusPage(layout.status_path(directory, rank), rank, 2) for rank in (0, 1)]
        self.groups = [page.group("0", [0, 1]) for page in self.pages]
        self.sleepers = [subprocess.Popen(["sleep", "1000"]) for _ in (0, 1)]
        self.members: Any = {
            rank: SimpleNamespace(pid=sleeper.pid, exited=None, thread_death=None)
            for rank, sleeper in enumerate(self.sleepers)
        }
        self.call(0, layout.ALL_REDUCE)

    def call(self, rank: int, op: int) -> int:
        return self.pages[rank].begin(layout.kind_of(self.groups[rank], op, 1), 1, 10)

    def watch(self, exchange: StallExchange, stall_after: float = STALL_AFTER) -> StallDetector:
        return StallDetector(Terms(stall_after, kills=False), self.directory, "runs/x", exchange, lambda: None)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr("phalanx.watchdog.stall.stack_dump._py_spy", lambda: None)  # they are not Python anyway
    for module in (snapshot, stack_dump):
        monkeypatch.setattr(module, "_ANSWER", 0.05)  # and never answer
    found = Ranks(tmp_path)
    found.clock = Clock()
    for module in (stall_detector, progress, across_nodes):
        monkeypatch.setattr(module, "time", found.clock)
    yield found
    found.pages.clear()
    for sleeper in found.sleepers:
        sleeper.kill()
        sleeper.wait()


def look(watch: StallDetector, ranks: Ranks, seconds: float) -> list[StallVerdict]:
    """Turns the watch until it says something, at most for so long by its clock."""
    deadline = ranks.clock.monotonic() + seconds
    while ranks.clock.monotonic() < deadline:
        watch.look(ranks.members)
        if said := list(watch.announced()):
            return said
        watch.close()  # what an inquiry takes, it takes by the other clock
        ranks.clock.ahead += STALL_AFTER / 10
    return []


def test_a_verdict_is_said_once_and_again_when_the_picture_changes(ranks: Ranks) -> None:
    watch = ranks.watch(StallExchange(Exchange()))
    (first,) = look(watch, ranks, LONG)
    assert first.lines[1].startswith("  rank 0 waits in all_reduce #1 (10 float32), tests/unit/test_stall_watchdog.py:")
    assert first.lines[2] == "  rank 1 is missing: it sleeps"
    assert first.lines[-1] == "  all stacks: runs/x/stall-1.txt; still waiting (--on-stall kill ends the run)"
    assert first.verdict is not None
    assert not look(watch, ranks, 3.5), "it has been looked at again, and has not changed"
    entry = ranks.call(1, layout.BARRIER)
    (second,) = look(watch, ranks, LONG)
    assert second.lines[0].endswith(": they have called different collectives")
    assert {path.name for path in ranks.directory.glob("stall-*")} == {"stall-1.txt", "stall-2.txt"}
    ranks.pages[1].end(entry, 0.5)
    (last,) = look(watch, ranks, LONG)
    assert last.lines[0].startswith("the ranks made progress again after ")
    assert last.verdict is None
    watch.close()


def test_a_change_is_seen_at_once(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.watchdog.stall.stall_detector._LOOK_AGAIN", 1000)
    watch = ranks.watch(StallExchange(Exchange()))
    assert look(watch, ranks, LONG)
    ranks.call(1, layout.BARRIER)
    assert look(watch, ranks, 4.0)
    watch.close()


def test_it_is_said_again_after_many_times_as_long(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.watchdog.stall.stall_detector._AGAIN", 3)
    watch = ranks.watch(StallExchange(Exchange()))
    (first,) = look(watch, ranks, LONG)
    (again,) = look(watch, ranks, LONG)
    assert first.lines[1:3] == again.lines[1:3]
    seconds = [float(found.lines[0].split()[-2]) for found in (first, again)]
    assert seconds[1] >= 2.8 * seconds[0]
    watch.close()


def test_without_a_limit_nothing_is_watched(ranks: Ranks) -> None:
    assert not look(ranks.watch(StallExchange(Exchange()), stall_after=0.0), ranks, 2.0)


def test_the_judge_waits_for_all_nodes(ranks: Ranks) -> None:
    """The snapshots of all nodes, with the stacks; a node whose ranks make progress has withdrawn its own."""
    published: list[bytes] = []
    exchange = StallExchange(Exchange(0, 0, range(2), {}, lambda topic, body, to_all: published.append(body)))
    watch = ranks.watch(exchange)
    without = messages.encode(StallSnapshot(30.0, (Observation(2),)))
    assert not look(watch, ranks, 1.0)
    (own,) = map(decoded, published)
    assert own.records is None, "the other node makes progress, so no rank need be asked"
    exchange.receive(1, without)
    until(lambda: decoded(published[-1]).records is not None, watch, ranks)
    assert len(published) == 2
    exchange.receive(1, messages.encode(StallOver()))
    record = RankRecord(2, "elsewhere", quiet=31.0, vitals=Vitals(7, "S"))
    complete = messages.encode(StallSnapshot(30.0, (Observation(2),), (record,)))
    assert not look(watch, ranks, 1.0)
    exchange.receive(1, complete)
    (verdict,) = look(watch, ranks, LONG)
    assert verdict.verdict is not None
    assert "=== rank 2 on elsewhere" in (ranks.directory / "stall-1.txt").read_text()
    assert published[-1] == messages.encode(verdict)
    watch.close()


def test_a_node_that_does_not_judge(ranks: Ranks) -> None:
    """It says what it knows, and repeats what the judge has concluded."""
    published: list[bytes] = []
    exchange = StallExchange(Exchange(1, 0, range(2), {}, lambda topic, body, to_all: published.append(body)))
    watch = ranks.watch(exchange)
    exchange.receive(0, messages.encode(StallSnapshot(30.0, (Observation(2),))))
    until(lambda: bool(published) and decoded(published[-1]).records is not None, watch, ranks)
    assert not list(watch.announced())
    verdict = StallVerdict(("a", "b"), HangRecord("h"), kills=True)
    exchange.receive(1, messages.encode(StallVerdict(("not the judge",))))
    exchange.receive(0, messages.encode(verdict))
    assert list(watch.announced()) == [verdict]
    entry = ranks.call(1, layout.BARRIER)
    ranks.pages[1].end(entry, 0.5)
    until(lambda: published[-1] == messages.encode(StallOver()), watch, ranks)
    watch.close()


def decoded(body: bytes) -> StallSnapshot:
    return messages.decode(body, StallSnapshot, "a test")


def test_a_snapshot_grows_older_and_a_lost_node_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lost = [100.0], {}
    monkeypatch.setattr("phalanx.watchdog.stall.across_nodes.time", SimpleNamespace(monotonic=lambda: now[0]))
    exchange = Exchange(0, 0, range(3), lost)
    stalls, paces = StallExchange(exchange), PaceExchange(exchange)
    record = RankRecord(2, quiet=40.0)
    stalls.receive(1, messages.encode(StallSnapshot(30.0, (Observation(2),), (record,))))
    paces.receive(1, messages.encode(PaceReport("elsewhere", {}, {})))
    assert stalls.others() is paces.others() is None
    lost[2] = "it has no power"
    now[0] = 105.0
    assert [(one.quiet, one.records and one.records[0].quiet) for one in stalls.others() or []] == [(35.0, 45.0)]
    assert [one.host for one in paces.others() or []] == ["elsewhere"]
    with pytest.raises(ForeignData):
        stalls.receive(1, b"\x80\x04cos\nsystem")


def test_the_seconds_are_those_since_the_page_was_written(ranks: Ranks) -> None:
    """Not since it was noticed, which may be a second later."""
    progress = ProgressMonitor(ranks.directory, 5.0)
    progress.look(ranks.members, ranks.clock.monotonic())
    ranks.pages[1].enter(layout.DATA)
    written = ranks.clock.monotonic()
    for _ in range(2):
        ranks.clock.ahead += 0.4
        progress.look(ranks.members, ranks.clock.monotonic())
    now = ranks.clock.monotonic()
    assert progress.quiet(now) == pytest.approx(now - written, abs=0.1)


def until(done: Callable[[], bool], watch: StallDetector, ranks: Ranks) -> None:
    deadline = ranks.clock.monotonic() + LONG
    while not done():
        assert ranks.clock.monotonic() < deadline
        assert not look(watch, ranks, 0.1)


def test_what_is_known_before_is_better_than_nothing(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inquiry itself may fail, wherever; the verdict is told all the same."""
    monkeypatch.setattr(snapshot, "stacks_of", lambda *_: 1 / 0)
    (announcement,) = look(ranks.watch(StallExchange(Exchange())), ranks, LONG)
    assert announcement.lines[1].startswith("  rank 0 waits in all_reduce #1 (10 float32)")
    assert "what could be found out (ZeroDivisionError: division by zero): runs/x/stall-1.txt" in announcement.lines[-1]


def test_a_name_that_is_cut_in_the_middle_of_a_character() -> None:
    code = "open('/proc/self/comm', 'wb').write('ä'.encode() * 9); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert procfs.status(process.pid)["Pid"] == str(process.pid)
        process.communicate(b"\n")


def test_a_look_that_takes_long_is_no_progress(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now, time=time.time))
    seen = progress.ProgressMonitor(ranks.directory, STALL_AFTER)
    plain = seen._look

    def slow(*arguments: Any) -> bool:
        clock.now += 2 * progress._SLEPT
        return plain(*arguments)

    monkeypatch.setattr(seen, "_look", slow)
    moved = []
    for _ in range(4):
        clock.now += 1.0
        moved.append(seen.look(ranks.members, clock.now))
    assert moved == [True, False, False, False]
    clock.now += 2 * progress._SLEPT
    assert seen.look(ranks.members, clock.now), "the agent itself was stopped: nobody knows what they did meanwhile"


def test_a_watch_that_fails_is_said_once_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    spec = SimpleNamespace(stall_after=1.0, on_stall="wait")
    noted: list[str] = []
    record = SimpleNamespace(note=lambda event, **fields: noted.append(fields["traceback"]))
    agent_lines = SimpleNamespace(say=lambda lines, *_: said.extend(lines))
    watchdogs = Watchdogs(cast(Any, spec), tmp_path, cast(Any, record), cast(Any, agent_lines), lambda: None)
    watchdogs.begin("runs/x", Exchange())

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(StallDetector, "look", fail)
    for _ in range(3):
        watchdogs.turn(cast(Any, SimpleNamespace(ranks={}, is_stopping=False, is_ending=False, any_started=False)))
    reason = "RuntimeError: can't start new thread"
    assert said == [f"the ranks' progress cannot be watched just now ({reason}); the run continues"]
    assert len(noted) == 1
    assert "in fail" in noted[0]


def test_a_new_attempt_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    """Until its ranks have written pages of their own, there are none."""
    paths = [events.error_path(tmp_path, 0), layout.status_path(tmp_path, 0)]
    for path in paths:
        path.touch()
    console = SimpleNamespace(out=1, err=2)
    spec, (place,) = LaunchSpec(Program("script", "x.py")), placements([1])
    rank = open_rank(spec, place, tmp_path, 1, cast(Any, console), lambda pipe: None, print)
    rank.close()
    assert [path.exists() for path in paths] == [False, False]
