"""The verdict on ranks that stand still: when there is one, what it finds, and its words, from records made by hand."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx import messages
from phalanx.devices.gpu_state import GpuState
from phalanx.events import ThreadDeath
from phalanx.launch.process import worker
from phalanx.source_lines import is_users, program_of
from phalanx.status import rank_record
from phalanx.status.layout import those
from phalanx.status.rank_record import Child, RankRecord, Vitals
from phalanx.status.reading import CodeLine, Collective, Group, Status
from phalanx.status.stack_parser import Thread, enclosing_loops, from_faulthandler, from_py_spy
from phalanx.system import procfs, tcp_bytes
from phalanx.watchdog.stall.classify import find_hang
from phalanx.watchdog.stall.dump_file import dump_lines, stack_lines
from phalanx.watchdog.stall.proc_sampler import ProcSampler
from phalanx.watchdog.stall.stall_text import go_on, headline, verdict_lines
from phalanx.watchdog.stall.threshold import Observation, observation_of, stall_threshold

STEP = CodeLine("train.py", 48, "step", "loss.backward()")
LIBRARY = "/usr/lib/python3.11/"
TORCH = LIBRARY + "site-packages/torch/"


def call(number: int = 812, op: str = "all_reduce", state: Any = "running", place: CodeLine | None = STEP, **more):
    known = {"group": "0", "dtype": "float32", "size": 25_557_032, "peer": None, **more}
    ended = 2.0 if state == "done" else None
    return Collective(
        number=number, op=op, state=state, queued_at=1.0, started_at=1.0, ended_at=ended, place=place, **known
    )


def page(rank: int, collectives: Sequence[Collective], ranks: int, **more) -> Status:
    known = {"phase": "backward", "epoch": 0, "step": 203, "samples": 0, "updates": 203, "beats": 9, "ended": 9}
    known |= {"since": 0.0, "waited": 0.0, "seconds": {}}
    known |= {"groups": (Group("0", tuple(range(ranks)), None, None),), **more}
    return Status(pid=100 + rank, rank=rank, world_size=ranks, started_at=0.0, collectives=tuple(collectives), **known)


def line(text: str, file: str = "data.py", number: int = 40, function: str = "load", **more) -> CodeLine:
    return CodeLine(file, number, function, text, is_users=not file.startswith(LIBRARY), **more)


def main(*lines: CodeLine) -> tuple[Thread, ...]:
    return (Thread(lines, "MainThread", is_main=True),)


def rank(number: int, *collectives: Collective, of: int = 4, lines: Sequence[CodeLine] = (), **more) -> RankRecord:
    """``lines``: of its main thread, innermost first; ``vitals`` and ``page``: what is not as usual."""
    vitals = Vitals(**{"pid": 100 + number, "state": "S", "resident": 1 << 30, **more.pop("vitals", {})})
    status = page(number, collectives, of, **more.pop("page", {}))
    known = {"host": "node0", "quiet": 31.0, "threads": main(*lines) if lines else (), **more}
    return RankRecord(number, status=status, vitals=vitals, **known)


def waiter(number: int, of: int = 4, **more) -> RankRecord:
    lines = (
        line("loss.backward()", "train.py", 48, "step", loops=((45, 55),)),
        line("main()", "train.py", 90, "<module>"),
    )
    return rank(number, call(811, state="done"), call(), of=of, lines=lines, **more)


def laggard(number: int = 1, *, of: int = 4, **more) -> RankRecord:
    """It has not come to collective 812."""
    return rank(number, call(811, state="done"), of=of, **more)


def told(records: Sequence[RankRecord]) -> list[str]:
    records = messages.decode(messages.encode(records), list[RankRecord], "here")
    hang = find_hang(records)
    lines = verdict_lines(hang)
    assert len(lines) <= 13
    assert all(len(one) <= 160 for one in [*lines, headline(hang)])
    assert "rank" in dump_lines(records, lines)
    return lines


def with_others(culprit: RankRecord) -> list[str]:
    """Rank 1 is the culprit, three others wait; the verdict without what is the same every time."""
    lines = told([waiter(0), culprit, waiter(2), waiter(3)])
    assert lines[:2] == [
        "no rank has made progress for 31 s",
        "  ranks 0, 2, 3 wait in all_reduce #812 (25,557,032 float32), train.py:48 in step: loss.backward()",
    ]
    return [one.strip() for one in lines[2:]]


# ---- a rank is missing


SLEEP = line("time.sleep(1000)")


def test_a_rank_sleeps() -> None:
    lines = with_others(laggard(lines=[SLEEP], vitals={"waits_in": "hrtimer_nanosleep"}, page={"phase": "data"}))
    assert lines == [
        "rank 1 is missing: it sleeps in load at data.py:40: time.sleep(1000)",
        "rank 1 (pid 101): last progress 31 s ago, in phase data, step 203, CPU 0 %",
    ]
    # Without the kernel's word the line's text must do.
    assert with_others(laggard(lines=[SLEEP], page={"phase": "data"})) == lines


@pytest.mark.parametrize(
    ("lines", "vitals", "text"),
    [
        ([line("x += 1")], {"state": "R", "cpu": 0.98}, "computes at 98 % CPU in load at data.py:40: x += 1"),
        ([line("input()")], {}, "waits for input in load at data.py:40: input()"),
        ([line("sync()")], {"state": "D", "waits_in": "os_acquire_rwlock_read"}, "waits in NVIDIA's driver, in the"),
        ([line("sync()")], {"state": "D", "waits_in": "nvidia_ioctl"}, "waits in NVIDIA's driver, in the kernel"),
        ([line("sync()")], {"state": "D", "waits_in": "folio_wait_bit"}, "waits for a disk or a network file system"),
        ([line("fcntl.flock(f, LOCK_EX)")], {}, "waits for a lock on a file in load at data.py:40: fcntl.flock(f"),
        (
            [line("prepare()")],
            {"waits_in": "locks_lock_inode_wait"},
            "waits for a lock on a file in load at data.py:40",
        ),
        (
            [line("db.execute(query)")],
            {"waits_in": "hrtimer_nanosleep"},
            "waits for a lock on an SQLite database in load at data.py:40: db.execute(query)",
        ),
        (
            [line("library.run()")],
            {"waits_in": "futex_wait_queue"},
            "waits for a lock or a thread inside native code in load at data.py:40: library.run()",
        ),
        ([line("store.get('config')")], {}, "waits for a key of a store in load at data.py:40: store.get('config')"),
        (
            [line("", LIBRARY + "subprocess.py", 1, "_try_wait"), line("subprocess.run(cmd)")],
            *({}, "waits for a process that it has started in load at data.py:40: subprocess.run(cmd)"),
        ),
        (
            [line("", LIBRARY + "socket.py", 1, "readinto"), line("urlopen(url)")],
            *({}, "waits for the network in load at data.py:40: urlopen(url)"),
        ),
        ([line("file.read()")], {"state": "D"}, "waits for a disk or a network file system in load at data.py:40"),
        ([line("library.run()")], {}, "does nothing in load at data.py:40: library.run()"),
        ([line("")], {"state": "t"}, "is held by a debugger (pid 101) in load at data.py:40"),
        (
            [line("x = big[i]")],
            {"state": "D", "swapped": 3 << 30, "faults": 240.0, "waits_for_disk": True},
            "is swapped out: 3.0 GiB are on disk, 1.0 GiB in memory, 240 pages a second come back in load at",
        ),
        ([], {}, "is somewhere else"),
    ],
)
def test_what_the_missing_rank_does(lines: list[CodeLine], vitals: dict, text: str) -> None:
    found = with_others(laggard(lines=lines, vitals=vitals))[0]
    assert found.startswith(f"rank 1 is missing: it {text}")


def on_gpu(state: str, watts: float | None = None, limit: float = 700.0, utilization: int = 100) -> dict[str, Any]:
    """What is known of a rank on a GPU, and of the GPU, if its driver says anything."""
    gpu = GpuState(0, "H100", memory_used=60 << 30, memory_total=80 << 30, utilization=utilization, power=watts)
    found = messages.replace(gpu, power_limit=limit, temperature=41)
    return {"page": {"device": state}, "gpu": None if watts is None else found}


def threshold(*records: RankRecord) -> float | None:
    return stall_threshold([observation_of(record) for record in records], 30.0)


def test_a_device_is_busy_or_its_rank_is_missing_on_the_host() -> None:
    """The host of rank 1 has called collective 812 already, and waits for its device in the same line as the others."""
    ready = [waiter(number, **on_gpu("waits")) for number in (0, 2, 3)]
    late = waiter(1, **on_gpu("busy", 120.0, utilization=0))
    hang = find_hang([*ready, late])
    assert (hang.kind, hang.culprits) == ("missing", (1,))
    lines = told([*ready, late])
    assert "rank 1 is missing: it waits for its device, which has not finished its own work in step" in lines[2]
    assert lines[3].endswith("CPU 0 %, H100: 60.0 of 80.0 GiB, 0 % busy, 120 of 700 W, 41 °C")
    # A rank that is elsewhere on its host comes first: a busy device may be one that waits for it.
    away = laggard(2, lines=[SLEEP], **on_gpu("idle"))
    assert find_hang([ready[0], late, away, ready[2]]).culprits == (2,)
    # On devices of which only the clock knows: without a collective in any page.
    quiet = [rank(number, **on_gpu(state)) for number, state in enumerate(("waits", "idle", "waits", "waits"))]
    assert (find_hang(quiet).kind, find_hang(quiet).culprits) == ("missing", (1,))
    assert find_hang([quiet[0], *quiet[2:]]).kind == "together"
    assert find_hang([rank(number, **on_gpu("busy")) for number in range(4)]).kind == "nobody"


def test_what_the_power_of_a_gpu_tells() -> None:
    """A kernel of NCCL that waits needs little power on a large GPU, and so does training that is bound by memory. On a
    small GPU it needs more than half. So the power shortens no threshold, and hides no open collective."""
    bound, spinning, computing = (waiter(1, **on_gpu("busy", *of)) for of in ((315, 700), (38, 70), (640, 700)))
    assert {one.device for one in (bound, spinning, computing)} == {"busy"}
    assert all(one.waits_in is not None for one in (bound, spinning, computing))
    assert "busy at little power: it may be waiting in NCCL" in str(bound.gpu)
    ready = [waiter(number, **on_gpu("waits")) for number in (0, 2, 3)]
    assert threshold(*ready, waiter(1, **on_gpu("waits", 640))) == 30.0
    ahead = rank(0, call(813), **on_gpu("waits"))  # not yet a hang: a host runs ahead of its device
    for late, limit in ((waiter(1, **on_gpu("busy")), 120.0), (bound, 120.0), (spinning, 300.0), (computing, 300.0)):
        assert threshold(*ready, late) == threshold(ahead, late) == limit
    away = laggard(2, lines=[SLEEP], **on_gpu("idle"))
    assert threshold(ready[0], away, spinning) == threshold(ready[0], away, bound) == 30.0
    for watts, limit in ((None, 120.0), (315, 120.0), (640, 300.0)):
        assert threshold(*(rank(number, **on_gpu("busy", watts)) for number in range(2))) == limit


def test_a_host_that_spins_for_its_device_does_not_work() -> None:
    busy = {"vitals": {"state": "R", "cpu": 1.0, "wants_cpu": True}}
    assert not observation_of(rank(0, **busy, **on_gpu("waits"))).works
    assert observation_of(rank(0, **busy, **on_gpu("idle"))).works


def test_a_rank_is_stopped_and_its_page_is_old() -> None:
    """Its page may still say that it waits in a collective: it could not write the end of it."""
    lines = with_others(rank(1, call(811), lines=[line("step()")], vitals={"state": "T"}))
    assert lines[0] == (
        "rank 1 is missing: it is stopped by a signal (SIGSTOP; kill -CONT 101 resumes it) "
        "in load at data.py:40: step()"
    )


def loader_worker(pid: int, *lines: CodeLine, **vitals) -> Child:
    """A process forked in the middle of the rank's loop, whose lines are therefore below its own."""
    below = (
        line("", TORCH + "utils/data/_utils/worker.py", 1, "_worker_loop"),
        line("for x in loader:", "train.py", 44),
    )
    return Child(Vitals(pid, **{"state": "S", **vitals}), "python train.py", main(*lines, *below))


IN_LOADER = [
    line("", LIBRARY + "selectors.py", 1, "select"),
    line("", TORCH + "utils/data/dataloader.py", 1, "_try_get_data"),
    line("for x in loader:", "train.py", 44, "train"),
]


def test_a_rank_is_in_the_data_loader() -> None:
    idle = loader_worker(201, line("", LIBRARY + "multiprocessing/queues.py", 1, "get"))
    stuck = loader_worker(202, line("time.sleep(1000)", "data.py", 40, "__getitem__"))
    lines = with_others(laggard(lines=IN_LOADER, children=(idle, stuck), page={"phase": "data"}))
    assert lines[:2] == [
        "rank 1 is missing: it waits for its data loader in train at train.py:44: for x in loader:",
        "its worker (pid 202) is at data.py:40 in __getitem__: time.sleep(1000)",
    ]
    busy = loader_worker(203, line("x += 1", "data.py", 41, "__getitem__"), cpu=1.0, state="R")
    assert with_others(laggard(lines=IN_LOADER, children=(idle, busy)))[1].startswith(
        "its worker (pid 203) (CPU 100 %) is at data.py:41"
    )
    stopped = loader_worker(204, line("x += 1", "data.py", 41, "__getitem__"), state="T")
    assert (
        "its worker (pid 204) is stopped by a signal"
        in with_others(laggard(lines=IN_LOADER, children=(stuck, stopped)))[1]
    )
    # Without workers the user's dataset is called by the loader, and is what the rank is in.
    own = [SLEEP, *IN_LOADER[1:]]
    assert with_others(laggard(lines=own))[0] == "rank 1 is missing: it sleeps in load at data.py:40: time.sleep(1000)"


def test_a_rank_has_left_the_loop() -> None:
    after = line("evaluate()", "train.py", 60, "step"), line("main()", "train.py", 90, "<module>")
    lines = with_others(laggard(lines=after, page={"step": 12}))
    assert lines[0] == (
        "rank 1 is missing: it has left the loop of train.py:45 after 12 steps "
        "and does nothing in step at train.py:60: evaluate()"
    )
    # It has left the whole function that the others are in.
    outside = [line("time.sleep(9)", "train.py", 91, "<module>")]
    assert with_others(laggard(lines=outside))[0].startswith(
        "rank 1 is missing: it has left the loop of train.py:45 after"
    )
    # Of several loops, the outermost that it has left.
    nested = waiter(0, of=2), laggard(of=2, lines=after)
    for last, first in ((58, 41), (70, 45)):
        loops = ((41, last), (45, 55))
        threads = main(
            line("loss.backward()", "train.py", 48, "step", loops=loops), line("main()", "train.py", 90, "<module>")
        )
        assert f"the loop of train.py:{first} " in told([messages.replace(nested[0], threads=threads), nested[1]])[2]
    # Further up, or in the loop, it has not.
    before = [line("prepare()", "train.py", 89, "<module>")]
    assert "left" not in with_others(laggard(lines=before))[0]
    for number in (44, 50):
        inside = line("time.sleep(9)", "train.py", number, "step"), line("main()", "train.py", 90, "<module>")
        assert "left" not in with_others(laggard(lines=inside))[0]


def test_a_rank_has_finished_or_ended() -> None:
    lines = with_others(laggard(lines=[line("", LIBRARY + "threading.py", 9, "_shutdown")], page={"phase": "done"}))
    assert lines[:2] == [
        "rank 1 is missing: it has finished its script",
        "its process (pid 101) has not ended: one of its threads may keep it",
    ]
    keeper = Thread((line("upload(file)", "log.py", 12, "write"),), "writer")
    main_thread = Thread((line("", LIBRARY + "threading.py", 9, "_shutdown"),), "MainThread", is_main=True)
    lines = with_others(laggard(threads=(keeper, main_thread), page={"phase": "done"}))
    assert lines[1] == "its process (pid 101) has not ended: a thread of it is at log.py:12: upload(file)"
    other = Thread((line("", LIBRARY + "threading.py", 9, "_bootstrap"),), "other", is_main=True)
    assert "one of its threads may keep it" in with_others(laggard(threads=(other,), page={"phase": "done"}))[1]
    closing = line("self.close()", LIBRARY + "log.py", 7, "__del__"), "a destructor"
    for handler, where in ((line("uploader.join()", "log.py", 30, "finish"), "an atexit handler"), closing):
        lines = with_others(
            laggard(lines=[line("", LIBRARY + "threading.py", 9, "join"), handler], page={"phase": "done"})
        )
        who = "its process (pid 101) has not ended: its main thread is in"
        assert lines[1] == f"{who} {where} at {handler.file}:{handler.line}: {handler.source}"
    ended = messages.replace(laggard(), exit_code=0, vitals=None)
    assert with_others(ended)[0] == "rank 1 is missing: it has ended with exit code 0"


def test_a_thread_is_deadlocked() -> None:
    mains = Thread((line("with lock:", "train.py", 33, "flush"),), "MainThread", is_main=True)
    holder = Thread((line("", LIBRARY + "queue.py", 1, "put"), line("results.put(x)", "log.py", 12, "write")), "writer")
    ours = Thread((CodeLine("/x/phalanx/recorder/flight.py", 1, "live", is_users=False),), "phalanx-recorder")
    lines = with_others(laggard(threads=(ours, holder, mains), vitals={"waits_in": "futex_wait_queue"}))
    assert lines[:2] == [
        "rank 1 is missing: it waits for a lock or another thread in flush at train.py:33: with lock:",
        "another thread of rank 1 may hold it: log.py:12 in write: results.put(x)",
    ]


def test_who_holds_a_lock_on_a_file(tmp_path: Path) -> None:
    table = tmp_path / "locks"
    table.write_text(
        "1: POSIX  ADVISORY  READ  9 fe:01:33 0 EOF\n2: FLOCK  ADVISORY  WRITE 4711 fe:01:34 0 EOF\n"
        "2: -> FLOCK  ADVISORY  WRITE 5 fe:01:34 0 EOF\n2: -> FLOCK  ADVISORY  WRITE 101 fe:01:34 0 EOF\n"
        "3: OFDLCK ADVISORY  WRITE -1 fe:01:35 0 EOF\n3: -> OFDLCK ADVISORY  WRITE 102 fe:01:35 0 EOF\n"
    )
    assert [procfs.lock_holder(pid, table) for pid in (101, 102, 4711)] == [4711, None, None]
    vitals = {"waits_in": "locks_lock_inode_wait", "lock_holder": "pid 4711 (python prepare.py)"}
    lines = with_others(laggard(lines=[line("fcntl.flock(f, LOCK_EX)")], vitals=vitals))
    assert lines[1] == "pid 4711 (python prepare.py) holds it"


def test_a_thread_has_died_that_is_waited_for() -> None:
    death = ThreadDeath("producer", "OSError: shard 12 is corrupt", "data.py:7")
    waiting = laggard(lines=[line("queue.get()")], thread_death=death, vitals={"waits_in": "futex_wait_queue"})
    lines = with_others(waiting)
    assert lines[:2] == [
        "rank 1 is missing: it waits for a lock or another thread in load at data.py:40: queue.get()",
        "its thread producer has died: OSError: shard 12 is corrupt at data.py:7",
    ]


def test_joining_and_rank_zero_first() -> None:
    joining = [call(0, "init_process_group", group="", dtype="", size=0, place=CodeLine("train.py", 5, "<module>"))]
    early = {"groups": (), "updates": 0, "step": 0, "phase": "joining"}
    records = [rank(0, *joining, page=early), rank(1, page={**early, "phase": "started"}, lines=[SLEEP])]
    assert told(records)[1:3] == [
        "  rank 0 waits in init_process_group, train.py:5",
        "  rank 1 is missing: it sleeps in load at data.py:40: time.sleep(1000)",
    ]
    # Who has joined is not missing there, whatever it does.
    joined = rank(2, call(0, "init_process_group", "done", group=""), page={**early, "phase": "other"}, lines=[SLEEP])
    assert find_hang([*records, joined]).culprits == (1,)
    following = call(0, "rank_zero_first", group="", dtype="", size=0, peer=0, place=None)
    records = [rank(0, lines=[SLEEP]), *(rank(number, following, lines=[line("with first:")]) for number in (1, 2, 3))]
    assert told(records)[1:3] == [
        "  ranks 1-3 wait in rank_zero_first, data.py:40 in load: with first:",
        "  rank 0 is missing: it sleeps in load at data.py:40: time.sleep(1000)",
    ]


def test_messages() -> None:
    receiving = call(3, "recv", peer=1, size=8)
    lines = told([rank(0, receiving, of=2), rank(1, of=2, lines=[SLEEP])])
    assert lines[1].startswith("  rank 0 waits in recv from rank 1 (8 float32)")
    assert lines[2].startswith("  rank 1 is missing: it sleeps")
    # Both receive: each waits for the other.
    lines = told([rank(0, receiving, of=2), rank(1, call(3, "recv", peer=0, size=8), of=2)])
    assert lines[0].endswith(": each waits for another one that waits elsewhere")
    lines = told([rank(number, call(3, "recv", peer=(number - 1) % 4, size=8)) for number in range(4)])
    assert lines[4] == "  rank 3 waits in another one; see the stacks"
    # One sends what the other receives.
    lines = told([rank(0, receiving, of=2), rank(1, call(1, "send", peer=0, size=8), of=2)])
    assert lines[0].endswith(", and all of them are there")


# ---- nobody is missing


def test_ranks_have_called_different_collectives() -> None:
    other = call(op="broadcast", place=CodeLine("train.py", 60, "evaluate", "dist.broadcast(x, 0)"), size=10)
    records = [waiter(0), rank(1, other), waiter(2)]
    assert told(records) == [
        "no rank has made progress for 31 s: they have called different collectives",
        "  ranks 0, 2 wait in all_reduce #812 (25,557,032 float32), train.py:48 in step: loss.backward()",
        "  rank 1 waits in broadcast #812 (10 float32), train.py:60 in evaluate: dist.broadcast(x, 0)",
    ]
    assert headline(find_hang(records)) == (
        "a hang: ranks 0, 2 called all_reduce #812 (25,557,032 float32) at train.py:48, "
        "rank 1 called broadcast #812 (10 float32) at train.py:60"
    )


def test_ranks_have_parted_before() -> None:
    """Some backends let two different calls pass, and hang at a later one."""
    parted = call(811, "barrier", "done", CodeLine("train.py", 61, "evaluate", "dist.barrier()"), dtype="", size=0)
    lines = told([waiter(0, of=2), rank(1, parted, call(812), of=2)])
    assert lines[0].endswith(": they have called different collectives")
    assert (
        "  rank 0 called all_reduce #811 (25,557,032 float32), train.py:48 in step: loss.backward(), and continued"
        in lines
    )
    assert "  rank 1 called barrier #811, train.py:61 in evaluate: dist.barrier(), and continued" in lines


def test_a_group_that_is_made_anew_counts_anew() -> None:
    """What was called in the group before is neither different nor ahead."""
    old = [call(number, "broadcast", "done") for number in (1, 2, 3)]
    again = call(0, "init_process_group", "done", group="")
    records = [rank(0, *old, again, call(1), of=2), rank(1, *old, again, of=2, lines=[SLEEP])]
    assert (find_hang(records).kind, find_hang(records).culprits) == ("missing", (1,))
    records = [rank(0, *old, call(1, state="done"), call(2), of=2), rank(1, *old, call(1, state="done"), of=2)]
    assert (find_hang(records).kind, find_hang(records).culprits) == ("missing", (1,))


def test_ranks_have_given_different_sizes() -> None:
    lines = told([waiter(0, of=2), rank(1, call(size=7), of=2)])
    assert lines[0].endswith(": they have called a collective with different sizes or types")
    assert "(25,557,032 float32)" in lines[1]
    assert "rank 1 waits in all_reduce #812 (7 float32)" in lines[2]
    # A gather may have other sizes on each rank.
    lines = told([rank(0, call(op="all_gather", size=3), of=2), rank(1, call(op="all_gather", size=4), of=2)])
    assert "different" not in lines[0]


def test_a_dead_link() -> None:
    records = [waiter(0, of=2), messages.replace(waiter(1, of=2), host="node1")]
    assert told(records) == [
        "no rank has made progress for 31 s, and all of them are there",
        "  ranks 0, 1 wait in all_reduce #812 (25,557,032 float32), train.py:48 in step: loss.backward()",
        "  nobody is missing and nothing moves: is the network between node0, node1 cut?",
    ]


def test_subgroups_are_waited_for_in_a_different_order() -> None:
    groups = (Group("left", (0, 1), None, None), Group("right", (0, 1), None, None))
    records = [rank(0, call(1, group="left"), of=2, page={"groups": groups})]
    records += [rank(1, call(1, group="right"), of=2, page={"groups": groups})]
    lines = told(records)
    assert lines[0].endswith(": each waits for another one that waits elsewhere")
    assert "rank 0 waits in all_reduce #1 of group left" in lines[1]
    # A rank that is not of the group is not missing in it.
    half = (Group("left", (0, 1), None, None),)
    records = [rank(0, call(1, group="left"), of=3, page={"groups": half}), rank(2, lines=[SLEEP], of=3)]
    records += [rank(1, of=3, lines=[line("x += 1", number=50)])]
    assert find_hang(records).culprits == (1,)


def test_nobody_waits() -> None:
    lines = told([rank(number, lines=[SLEEP]) for number in range(4)])
    assert lines[:2] == [
        "no rank has made progress for 31 s, and nobody waits for another",
        "  ranks 0-3: each sleeps in load at data.py:40: time.sleep(1000)",
    ]


def test_who_has_ended_is_not_to_blame_when_nobody_waits() -> None:
    ended = messages.replace(rank(0, of=2), exit_code=0, vitals=None)
    lines = told([ended, rank(1, of=2, lines=[SLEEP])])
    assert lines[1] == "  rank 1: it sleeps in load at data.py:40: time.sleep(1000)"
    assert "rank 0" not in "".join(lines)


def test_what_torch_does_not_tell() -> None:
    unseen = call(0, "collective", group="", dtype="", size=0)
    lines = told([rank(0, unseen, of=2), rank(1, call(0, "collective", "done", group=""), of=2, lines=[SLEEP])])
    assert lines[1].startswith("  rank 0 waits in a collective, train.py:48")
    assert lines[2].startswith("  rank 1 is missing: it sleeps")


def test_what_gloo_has_not_said_yet() -> None:
    """How far its group has come is known before the collective's name."""
    behind = {"groups": (Group("0", (0, 1), 12, 11),)}
    records = [rank(0, of=2, page=behind, lines=[line("loss.backward()")]), rank(1, of=2, lines=[SLEEP])]
    assert told(records)[1] == "  rank 0 waits in collective #12, data.py:40 in load: loss.backward()"
    # It has said it meanwhile: it has ended.
    records[0] = rank(0, call(12, state="done"), of=2, page=behind, lines=[SLEEP])
    assert records[0].waits_in is None


@pytest.mark.parametrize("world", [64, 256])
def test_many_ranks_and_still_a_small_screen(world: int) -> None:
    everywhere = [
        laggard(number, of=world, lines=[line("time.sleep(9)", number=number)]) for number in range(0, world, 2)
    ]
    records = sorted(
        [*everywhere, *(waiter(number, of=world) for number in range(1, world, 2))], key=lambda one: one.rank
    )
    lines = told(records)
    assert lines[1].startswith(f"  {world // 2} ranks (1, 3, 5, 7, 9, 11, 13, …) wait in all_reduce #812")
    assert "are elsewhere; see the stacks" in lines[-1]
    different = [rank(n, call(op="broadcast" if n % 2 else "reduce", size=n), of=world) for n in range(world)]
    assert len(told(different)) <= 13
    in_loader = [laggard(n, of=world, lines=[*IN_LOADER[:2], line("for x in loader:", number=n)]) for n in range(5)]
    in_loader = [messages.replace(one, children=(loader_worker(9, SLEEP),)) for one in in_loader]
    assert 10 <= len(told([*in_loader, *different[5:]])) <= 13
    assert told([waiter(n, of=world) for n in range(world)])[1].startswith(f"  ranks 0-{world - 1} wait in")


def test_when_the_picture_changes() -> None:
    def picture(number: int, **vitals: Any) -> tuple[object, ...]:
        return find_hang([waiter(0), laggard(lines=[line("x += 1", number=number)], vitals=vitals)]).picture

    assert picture(40) != picture(41)
    assert picture(40) != picture(40, state="T")
    assert picture(40, cpu=1.0) == picture(41, cpu=0.9), "a loop goes round and round"


def test_small_words() -> None:
    assert [those(ranks) for ranks in ([1], [0, 1], [7, 0, 2, 3, 4])] == ["rank 1", "ranks 0, 1", "ranks 0, 2-4, 7"]
    assert go_on(43.2) == "the ranks made progress again after 43 s"
    record = laggard(lines=[SLEEP], vitals={"waits_in": "hrtimer_nanosleep"})
    assert headline(find_hang([waiter(0), record])) == (
        "a hang: rank 1 sleeps at data.py:40 while rank 0 waits in all_reduce #812"
    )


# ---- when it is a stall

SAME = ("0", 812, "all_reduce", 10)
GONE = Observation(0, has_ended=True, is_gone=True)
WAITS, IDLE, WORKS = Observation(0, waits_in=SAME), Observation(1), Observation(1, works=True)


@pytest.mark.parametrize(
    ("why", "sightings", "seconds"),
    [
        ("one is missing and does nothing", [WAITS, IDLE], 30),
        ("one is missing and works", [WAITS, WORKS], 120),
        ("it works, and nobody has made a step yet", [WAITS, WORKS], 300),
        ("it has not even joined, and works", [WAITS, Observation(1, works=True, has_joined=False)], 120),
        ("it saves a checkpoint", [WAITS, Observation(1, works=True, phase="checkpoint")], None),
        ("it saves a checkpoint, and does nothing", [WAITS, Observation(1, phase="checkpoint")], 30),
        ("all wait in the same, and nothing happens", [WAITS, WAITS], 30),
        ("all wait in the same, and bytes move", [WAITS, Observation(1, waits_in=SAME, works=True, moves=True)], None),
        ("all wait in the same, and compute", [WAITS, Observation(1, waits_in=SAME, works=True)], 300),
        ("they wait in different ones", [WAITS, Observation(1, waits_in=("0", 812, "barrier", 0))], 30),
        ("nobody waits, and nobody does anything", [IDLE, IDLE], 30),
        ("nobody waits, and one works", [IDLE, WORKS], None),
        ("nobody waits, and one has ended", [IDLE, Observation(1, has_ended=True)], 300),
        ("one has come to its end and works there", [Observation(1, has_ended=True, works=True), GONE], None),
        ("one has come to its end and does nothing", [Observation(1, has_ended=True), GONE], 300),
        ("all have ended", [GONE, GONE], None),
        ("one waits for another that has ended", [WAITS, Observation(1, has_ended=True)], 30),
        ("nobody has joined", [Observation(0, has_joined=False), Observation(1, has_joined=False)], None),
        ("there is only one", [IDLE], None),
    ],
)
def test_stall_threshold(why: str, sightings: list[Observation], seconds: float | None) -> None:
    if "yet" in why:
        sightings = [messages.replace(one, has_stepped=False) for one in sightings]
    assert stall_threshold(sightings, 30.0) == seconds, why


def test_what_counts_as_work() -> None:
    """Also that of the processes that a rank has started."""
    assert not observation_of(laggard()).works
    for vitals in ({"cpu": 0.3}, {"wants_cpu": True}, {"bytes_moved": 1e6}, {"waits_for_disk": True, "state": "D"}):
        assert observation_of(laggard(vitals=vitals)).works
    assert observation_of(laggard(children=(loader_worker(201, cpu=0.9),))).works
    assert observation_of(waiter(0)).waits_in == ("0", 812, "all_reduce", 25_557_032)
    assert observation_of(rank(0, call(0, "init_process_group", "done", group=""), page={"groups": ()})).has_joined
    assert not observation_of(rank(0, page={"groups": ()})).has_joined


# ---- stacks

DUMP = """Thread 0x00007f1500ae76c0 (most recent call first):
  File "/tmp/\\u6587.py", line 4 in \\u65b9\\u6cd5
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007f150167ab80 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/functional.py", line 7 in f
  File "/tmp/train.py", line 7 in <module>
"""


def test_faulthandler() -> None:
    other, mains = from_faulthandler(DUMP)
    assert (other.is_main, mains.is_main) == (False, True)
    assert other.shown == CodeLine("/tmp/文.py", 4, "方法")
    assert mains.shown == CodeLine("/tmp/train.py", 7, "<module>")
    (alone,) = from_faulthandler('Stack (most recent call first):\n  File "a.py", line 1 in f\n')
    assert alone.is_main
    named = from_faulthandler(DUMP.replace("6c0 (", "6c0 [MainThread] ("))
    assert [thread.is_main for thread in named] == [True, False]
    assert from_faulthandler("") == ()
    assert from_faulthandler("Thread 0x0 (most recent call first):\n  <no Python frame>\n")[0].shown is None


def test_py_spy() -> None:
    text = (
        '[{"pid": 5, "os_thread_id": 5, "thread_name": null, "frames": [{"name": "f", "filename": "a.py", "line": 3}]}]'
    )
    assert from_py_spy(text) == (Thread((CodeLine("a.py", 3, "f"),), "", is_main=True),)
    assert from_py_spy("Error: no Python") == ()


def test_whose_a_file_is() -> None:
    assert all(map(is_users, ("/home/ada/train.py", "/work/library/model.py")))
    libraries = ("/opt/py/lib/python3.12/queue.py", "/x/.venv/lib/python3.11/site-packages/a.py", "<string>")
    assert not any(map(is_users, (*libraries, rank_record.__file__, json.__file__)))


def test_the_installed_package_of_the_program_is_the_users() -> None:
    package = "/x/site-packages/package"
    stack = (rank_record.__file__, "<frozen runpy>", f"{package}/train.py", f"{package}/model.py")
    assert program_of(stack) == f"{package}/"
    assert is_users(f"{package}/model.py", program_of(stack))
    assert not is_users(f"{package}2/model.py", program_of(stack))
    assert program_of(("/home/ada/train.py", f"{package}/model.py")) == ""
    assert program_of((f"{package}.py",)) == f"{package}.py"
    text = "Thread 0x1 [MainThread] (most recent call first):\n" + "".join(
        f'  File "{file}", line 1 in f\n' for file in ("/x/site-packages/torch/a.py", *reversed(stack))
    )
    (main,) = from_faulthandler(text)
    assert [line.file for line in main.users] == [f"{package}/model.py", f"{package}/train.py"]


PROGRAM = """
for epoch in range(3):
    for x in loader:
        step()
    else:
        pass
    def inner():
        while True:
            pass
evaluate()
"""


@pytest.mark.parametrize(
    ("number", "loops"),
    [(2, ((2, 9),)), (4, ((2, 9), (3, 4))), (6, ((2, 9),)), (9, ((8, 9),)), (10, ())],
)
def test_the_loops_around_a_line(number: int, loops: tuple) -> None:
    assert enclosing_loops(PROGRAM, number) == loops
    assert enclosing_loops("for x in", 1) == ()


# ---- what the kernel says


def test_what_connections_move() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        before = tcp_bytes.moved_by(os.getpid(), tcp_bytes.moved_by_connection())
        one.sendall(bytes(50_000))
        received = 0
        while received < 50_000:
            received += len(other.recv(50_000))
        other.sendall(b"x")
        one.recv(1)  # what was sent has been acknowledged
        after = tcp_bytes.moved_by(os.getpid(), tcp_bytes.moved_by_connection())
        other.close()
    assert 100_000 <= after - before < 101_000


def test_a_chart_of_a_process_and_its_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        chart = ProcSampler(window=10.0)
        chart.look([os.getpid()], now=100.0)
        deadline = time.monotonic() + 20
        while chart.span == 0.0 or not (found := chart.vitals(child.pid)) or found.cpu < 0.05:
            assert time.monotonic() < deadline
            chart.look([os.getpid()], now=101.0)
        assert child.pid in chart.families[os.getpid()]
        assert found.works
        assert found.resident > 1 << 20
        child.send_signal(signal.SIGSTOP)
        while found.state != "T":
            chart.look([os.getpid()], now=102.0)
            found = chart.vitals(child.pid)
            assert found is not None
    finally:
        child.kill()
        child.wait()
    chart.look([os.getpid()], now=103.0)
    assert chart.vitals(child.pid) is None


SPINS = """
import threading, time
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
time.sleep(100)
"""


def test_threads_of_nccl_do_not_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They spin while the rank waits; and a rank that sleeps in the GPU's driver does not wait for a disk."""
    child = subprocess.Popen([sys.executable, "-c", SPINS])
    try:
        chart, started = ProcSampler(window=100.0), time.monotonic()
        while True:
            chart.look([child.pid], time.monotonic())
            found, on_gpu = (chart.vitals(child.pid, is_on_gpu=is_on_gpu) for is_on_gpu in (False, True))
            if found is not None and on_gpu is not None and found.cpu > 4 * on_gpu.cpu and chart.span > 0.2:
                break  # how much of a core the thread gets depends on the machine
            assert time.monotonic() < started + 20
            time.sleep(0.05)
        for reading in (readings := chart._readings[child.pid]):
            vars(reading.facts)["state"] = "D"
        assert readings
        monkeypatch.setattr(procfs, "wchan", lambda pid: "nvidia_ioctl")
        assert (stuck := chart.vitals(child.pid, is_on_gpu=True)) is not None
        assert not stuck.waits_for_disk
        monkeypatch.setattr(procfs, "wchan", lambda pid: "folio_wait_bit")
        assert (slow := chart.vitals(child.pid, is_on_gpu=True)) is not None
        assert slow.waits_for_disk
    finally:
        child.kill()
        child.wait()


def test_a_stack_ends_with_the_script() -> None:
    launch = str(worker.__file__)
    lines = [
        CodeLine("/lib/torch/x.py", 3, "wait"),
        CodeLine("/home/ada/train.py", 5, "<module>"),
        CodeLine(launch, 9, "run"),
    ]
    ends = (*lines, CodeLine("<string>", 1, "<module>"))
    assert list(stack_lines(Thread(ends))) == ["  /lib/torch/x.py:3 in wait", "  /home/ada/train.py:5 in <module>"]
    assert len(list(stack_lines(Thread(ends[2:])))) == 2, "of a rank that has not come to its script"
