"""Which rank is slow: from windows of ten steps to findings, and what a machine says of a process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median_high
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.status import layout, reading
from phalanx.status.page import StatusPage
from phalanx.status.windows import Window, read_windows
from phalanx.system import cgroups, procfs
from phalanx.watchdog.exchange import Exchange
from phalanx.watchdog.straggler import conditions, straggler_detector
from phalanx.watchdog.straggler.across_nodes import PaceExchange, PaceReport
from phalanx.watchdog.straggler.conditions import Conditions
from phalanx.watchdog.straggler.pace import PaceMonitor
from phalanx.watchdog.straggler.straggler_detector import Field, Judge, Straggler, slowest

USUAL = {"data": 5.0, "forward": 10.0, "backward": 12.0, "optimizer": 2.0, "checkpoint": 0.0, "other": 1.0}
"""Milliseconds of a step: 30 together."""


def window(updates: int, **more: float) -> Window:
    """``more``: milliseconds in a step, beyond what is usual."""
    return Window(updates, {phase: (ms + more.get(phase, 0.0)) / 1e3 * 10 for phase, ms in USUAL.items()})


def judged(*windows: dict[int, Window], judge: Judge | None = None) -> list[Straggler]:
    judge = judge or Judge()
    return [found for step in windows for found in judge.add({rank: [one] for rank, one in step.items()})]


def steps(count: int, first: int = 20, world: int = 4, slow: int = 1, **more: float) -> list[dict[int, Window]]:
    """Windows of all ranks, of which one is slower."""
    return with_one(slow, count, first, world, more)


def with_one(slow: int, count: int, first: int, world: int, more: dict[str, float]) -> list[dict[int, Window]]:
    return [
        {rank: window(first + 10 * index, **(more if rank == slow else {})) for rank in range(world)}
        for index in range(count)
    ]


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0]), min_size=2, max_size=9))
def test_the_middle_of_the_others_is_found_without_sorting_them_for_each(times: list[float]) -> None:
    field = Field({rank: Window(10, {"data": seconds, "forward": 1.0}) for rank, seconds in enumerate(times)})
    for rank, seconds in enumerate(times):
        lag = field.compare(rank)
        usual = median_high(times[:rank] + times[rank + 1 :])
        assert (lag.own, lag.usual) == ((seconds + 1.0) / 10, (usual + 1.0) / 10)
        assert lag.excess == {"data": (seconds - usual) / 10, "forward": 0.0}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_a_rank_that_is_slower_for_50_steps_is_named_with_the_phase(world: int, phase: str) -> None:
    assert judged(*with_one(1, 4, 20, world, {phase: 9.0})) == []
    (found,) = judged(*with_one(1, 20, 20, world, {phase: 9.0}))
    assert (found.rank, found.steps, found.is_over) == (1, 50, False)
    assert found.lag.slower == pytest.approx(0.3)
    assert (found.lag.own, found.lag.usual) == pytest.approx((0.039, 0.030))
    assert found.lag.phases == (phase,)


def test_a_machine_that_is_slow_is_slow_in_all_that_it_computes() -> None:
    (found,) = judged(*steps(5, forward=10.0, backward=12.0, optimizer=2.0))
    assert found.lag.phases == ("backward", "forward")
    assert straggler_detector.phases(found.lag) == "backward and forward"


@pytest.mark.parametrize(
    "quiet",
    [
        steps(50, data=5.0),
        steps(50, world=3, forward=-9.0, backward=-9.0),
        [step for index in range(50) for step in steps(1, 20 + 10 * index, slow=index % 3, data=20.0)],
        [
            step
            for index in range(50)
            for step in steps(1, 20 + 10 * index, slow=0, checkpoint=900.0 * (index % 3 == 0))
        ],
        steps(50, world=1, slow=0, data=90.0),
    ],
    ids=["17 %", "one is fast", "alternating", "checkpoints of rank 0", "alone"],
)
def test_what_is_no_straggler(quiet: list[dict[int, Window]]) -> None:
    assert judged(*quiet) == []


def test_less_than_a_millisecond_is_noise() -> None:
    tiny = [
        {rank: Window(20 + 10 * index, {"forward": 0.01 + 0.009 * (rank == 1)}) for rank in range(3)}
        for index in range(50)
    ]
    assert judged(*tiny) == []


def test_it_is_said_when_it_is_over_and_when_it_begins_again() -> None:
    judge = Judge()
    assert [found.is_over for found in judged(*steps(20, data=9.0), judge=judge)] == [False]
    assert judged(*steps(4, 220), judge=judge) == [], "four windows are not enough"
    assert judged(*steps(6, 260, data=9.0), judge=judge) == [], "it was not over"
    (over,) = judged(*steps(10, 320), judge=judge)
    assert (over.rank, over.is_over) == (1, True)
    assert straggler_detector.one_line(over, "b", None) == (
        "rank 1 keeps up again: own work 30 ms a step against 30 ms, for 50 steps"
    )
    assert [found.is_over for found in judged(*steps(5, 420, data=9.0), judge=judge)] == [False]


def test_only_windows_that_all_ranks_have_are_compared() -> None:
    """One rank keeps fewer of them, one makes no steps at all, and one has ended."""
    judge = Judge()
    slow = [window(updates, data=9.0) for updates in range(20, 220, 20)]
    usual = [window(updates) for updates in range(20, 220, 10)]
    assert judge.add({0: usual[:2], 1: slow[:2], 2: usual[:2], 3: []}) == []
    (found,) = judge.add({0: usual, 1: slow, 2: usual, 3: []})
    assert (found.rank, found.steps) == (1, 90)
    assert judge.add({0: usual, 2: usual, 3: []}) == []
    assert judge.suspects == set()


def test_the_slowest_of_a_moment() -> None:
    usual = [window(20), window(30), window(40)]
    found = slowest({0: usual, 1: [window(30, data=3.0), window(40, data=3.0), window(50)], 2: usual})
    assert found is not None
    assert (found[0], found[1].slower, found[1].phases) == (1, pytest.approx(0.1), ("data",))
    assert slowest({0: usual, 1: []}) is None
    assert slowest({0: usual, 1: [window(50)]}) is None


def test_the_line() -> None:
    (found,) = judged(*steps(5, data=9.0))
    under = Conditions(0.48, 0.02, 0.31, 0.0, 1 << 28, 0, 0.5, 1.0, 2)
    assert straggler_detector.one_line(found, "b", under) == (
        "rank 1 is 30 % slower than the median (own work 39 ms a step against 30 ms) for 50 steps, in data; "
        "on host b: CPU share 48 %, throttled by its cgroup 31 % of the time"
    )
    bad = Conditions(0.1, 0.5, 0.0, 0.25, 1 << 28, 3 << 20, 0.97, 9.0, 2)
    assert str(bad) == (
        "CPU share 10 %, waiting for a core 50 % of the time, waiting for a disk 25 % of the time, "
        "3 MiB of it swapped out, memory 97 % used, load 9.0 on 2 cores"
    )


# ---- the page


def test_own_work_and_waiting_are_told_apart_in_windows(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "page")
    group = layout.kind_of(page.group("0", [0, 1]), 1, 1)
    for _ in range(40):
        page.enter(layout.DATA)
        page.enter(layout.BACKWARD)
        page.end(page.begin(group, 1, 8), 0.001)  # a collective in the loop's own thread
        assert page.block()
        assert not page.block(), "it is known already"
        page.end(page.begin(group, 1, 8), 5.0)  # a part of what it waits for
        time.sleep(0.001)
        page.unblock()
        page.unblock()
        page.enter(layout.OPTIMIZER)
        page.stepped(layout.OTHER)
    found = reading.read(tmp_path / "page")
    assert found is not None
    assert 0.08 < found.blocked["backward"] < found.seconds["backward"] + 0.041
    assert found.blocked_since is None
    windows = read_windows(tmp_path / "page")
    assert windows[0].updates == 20, "the first ten steps are warming up"
    assert all(one.updates % 10 == 0 for one in windows)
    assert all(one.seconds["backward"] < 0.01 for one in windows)
    assert all(0 < one.own < 0.01 for one in windows)
    page.block()
    waiting = reading.read(tmp_path / "page")
    assert waiting is not None
    assert waiting.blocked_since == pytest.approx(time.time(), abs=1.0)
    page.unblock()
    page.begin(group, 2, 8)  # now it is in a call
    calling = reading.read(tmp_path / "page")
    assert calling is not None
    assert calling.blocked_since == calling.collectives[-1].queued_at


def test_short_steps_are_sampled_at_the_same_steps_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr("phalanx.status.page.time", lambda: now)
    seen: list[set[int]] = []
    for rank, millisecond in enumerate((0.5, 1.1)):
        path, found = tmp_path / f"{rank}", set[int]()
        page = StatusPage(path, rank, 2)
        for step in range(1, 33_001):
            slowly = 4 if step // 3700 % 2 else 1  # what is seen less often has to be seen more often again
            now += slowly * millisecond / 1e3
            page.stepped(layout.FORWARD)
            if step % 500 == 0:
                found |= {one.updates for one in read_windows(path)}
        windows = read_windows(path)
        assert all(one.seconds["forward"] == pytest.approx(10 * millisecond / 1e3, rel=1e-3) for one in windows)
        apart = [(after.updates - before.updates) * millisecond for before, after in itertools.pairwise(windows)]
        assert all(100 <= each <= 400 for each in apart), apart
        assert len(found) > 90
        seen.append(found)
    assert len(seen[0] & seen[1]) > 0.9 * min(map(len, seen))


# ---- the agents


def write_windows(path: Path, rank: int, steps: int, own: float) -> StatusPage:
    page = StatusPage(path, rank, 4)
    for step in range(20, steps + 1, 10):
        page._windows.due = step
        page._windows._begun = (0.0,) * len(layout.OWN)
        page._windows._write((10 * own, *(0.0,) * (len(layout.OWN) - 1)))
    return page


def test_one_node_compares_the_ranks_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3, on the second node, is slow: the second sends what it knows, and the first says it to both."""
    now = 0.0
    monkeypatch.setattr("phalanx.watchdog.straggler.pace.time.monotonic", lambda: now)
    published: list[tuple[bytes, bool]] = []
    exchanges = [
        PaceExchange(Exchange(node, 0, range(2), {}, lambda topic, *entry: published.append(entry)))
        for node in range(2)
    ]
    agents = [PaceMonitor(tmp_path) for _ in range(2)]
    members: list[Any] = [
        {rank: SimpleNamespace(pid=os.getpid(), exited=None) for rank in ranks} for ranks in ((0, 1), (2, 3))
    ]
    for agent, exchange in zip(agents, exchanges, strict=True):
        agent.begin(exchange)
    for moment in range(4):
        for rank in range(4):
            write_windows(layout.status_path(tmp_path, rank), rank, 20 + 20 * moment, 0.030 + 0.010 * (rank == 3))
        for exchange, agent, own in zip(exchanges, agents, members, strict=True):
            now = 10.0 * (moment + 1)
            agent.look(own)
            if exchange.is_judge and moment == 0:
                assert not published, "it does not judge without the other one"
        exchanges[0].receive(1, [body for body, to_all in published if not to_all][-1])
    now = 100.0
    agents[0].look(members[0])
    (announced,) = exchanges[0].announced
    assert (announced.straggler.rank, announced.straggler.phases) == (3, ("data",))
    assert announced.straggler.conditions is not None
    assert announced.straggler.conditions.cores > 0
    assert announced.lines[0].startswith("rank 3 is 33 % slower than the median (own work 40 ms a step against 30 ms)")
    (passed_on,) = [body for body, to_all in published if to_all]
    exchanges[1].receive(0, passed_on)
    assert exchanges[1].announced[0].lines == announced.lines


def test_the_same_rank_is_named_twice_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("phalanx.watchdog.straggler.pace.time.monotonic", lambda: now)
    monkeypatch.setattr("phalanx.watchdog.straggler.pace._LONG_ENOUGH", 0.0)
    exchange, pace = PaceExchange(Exchange()), PaceMonitor(tmp_path)
    pace.begin(exchange)
    members: Any = {rank: SimpleNamespace(pid=os.getpid(), exited=None) for rank in range(2)}
    latest: dict[int, list[Window]] = {}
    monkeypatch.setattr(
        "phalanx.watchdog.straggler.pace.read_windows", lambda path: latest[int(path.stem.partition("-")[2])]
    )
    for turn in range(8):
        found = steps(5, 20 + 50 * turn, world=2, data=9.0 * (turn % 2 == 0))
        latest.update({rank: [step[rank] for step in found] for rank in range(2)})
        now += 10.0
        pace.look(members)
    assert [bool(one.lines) for one in exchange.announced] == [True] * 4 + [False] * 4
    assert [one.straggler.is_over for one in exchange.announced] == [False, True] * 4


def test_a_report_of_another_node_is_read_as_it_was_written() -> None:
    published: list[bytes] = []
    sender = PaceExchange(Exchange(1, 0, range(2), {}, lambda topic, body, to_all: published.append(body)))
    judge = PaceExchange(Exchange(0, 0, range(2)))
    sent = PaceReport(
        "b", {2: (window(20), window(30, data=1.0)), 3: ()}, {2: Conditions(0.5, 0.5, 0.5, 0.5, 1, 2, 0.5, 1.0, 2)}
    )
    sender.report(sent)
    judge.receive(1, published[0])
    assert judge.others() == [sent]


# ---- the machine


def test_what_is_known_of_a_process() -> None:
    code = "import sys, time; print(len(bytearray(50 << 20)), flush=True); sys.stdin.read()"
    arguments = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = procfs.descendants(parent.pid)
        found, known = procfs.facts(child), psutil.Process(child)
        assert found is not None
        assert (found.pid, found.swapped) == (child, 0)
        assert found.state in "RS", "it has written its line, and goes to sleep"
        assert found.resident == pytest.approx(known.memory_info().rss, rel=0.1)
        assert found.cpu == pytest.approx(sum(known.cpu_times()[:2]), abs=0.05)
        before = conditions.looks([parent.pid])[parent.pid]
        parent.communicate()
    assert before.cpu >= found.cpu, "those of its family are its own"
    assert procfs.facts(child) is None
    assert procfs.descendants(parent.pid) == set()
    assert conditions.looks([parent.pid]) == {}


def test_conditions_are_shares_of_the_time_between_two_looks() -> None:
    before = conditions.looks([os.getpid()])[os.getpid()]
    deadline = time.process_time() + 0.2
    while time.process_time() < deadline:
        pass
    after = conditions.looks([os.getpid()])[os.getpid()]
    found = conditions.between(before, after)
    assert 0.15 / (after.at - before.at) < found.cpu < 1.6
    assert 0 < found.memory_used < 1


@pytest.mark.parametrize(
    ("statistics", "seconds"),
    [
        ("usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000\n", 2.5),
        ("nr_periods 5\nnr_throttled 3\nthrottled_time 1500000000\n", 1.5),
        ("usage_usec 9\n", 0.0),
    ],
    ids=["version 2", "version 1", "not counted"],
)
def test_what_a_quota_has_taken(statistics: str, seconds: float, tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/a/b\n" if "time" in statistics else "0::/a/b\n")
    group = tmp_path / ("cpu/a" if "time" in statistics else "a")  # the limit is one above
    (group / "b").mkdir(parents=True)
    (group / "cpu.stat").write_text(statistics)
    assert cgroups.throttled(membership, tmp_path) == seconds
    assert cgroups.throttled(tmp_path / "nothing", tmp_path) == 0.0
