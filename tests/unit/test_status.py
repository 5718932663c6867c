"""The status page: what is written is read, from outside, at any moment, in the middle of writing too."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import CodeType

import pytest

from phalanx import messages, status
from phalanx.preemption import words
from phalanx.status import code_lines, layout, own_page, reading
from phalanx.status.page import StatusPage
from phalanx.status.stack_parser import from_faulthandler
from phalanx.store import tcp_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-3.status"


def found_at(path: Path) -> reading.Status:
    found = reading.read(path)
    assert found is not None
    return found


def all_reduce(page: StatusPage, group: int, number: int, is_running: bool = True) -> int:
    return page.begin(layout.kind_of(group, 1, 1), number, 1000, is_running)


def test_the_loop(path: Path) -> None:
    page = StatusPage(path, 3, 4)
    page.beat(layout.DATA, 3, 17, 544)
    page.stepped(layout.BACKWARD)
    found = found_at(path)
    assert (found.rank, found.world_size, found.epoch, found.step, found.samples) == (3, 4, 3, 17, 544)
    assert (found.phase, found.updates) == ("backward", 1)
    assert set(found.seconds) == set(layout.PHASES)
    assert found.seconds["data"] > 0
    assert found.seconds["backward"] == 0


def test_the_parts_of_a_page_do_not_overlap() -> None:
    """A window of steps once reached into the words by which ranks agree where to stop."""
    records = [
        (layout.LOOP, layout.LOOP_RECORD.size // layout.WORD),
        (layout.CHECKPOINT_STEP, 1),
        (layout.CONNECTING, layout.CONNECTING_BYTES // layout.WORD),
        (layout.SECONDS, len(layout.PHASES) + 1),
        (layout.ASKED, 2),
        (layout.STACKS_ASKED, 2),
        (layout.BLOCKED, len(layout.PHASES) + 1),
        (layout.DEVICE_STEPS, 1),
        (layout.DEVICE_SECONDS, layout.DEVICE_TIMES.size // layout.WORD),
        (layout.DEVICE_STATE, 1),
        (layout.GROUP, layout.GROUPS * layout.GROUP_WORDS),
        (layout.RING, layout.RING_ENTRIES * layout.ENTRY_WORDS),
        (layout.PLACE, layout.PLACES * layout.PLACE_WORDS),
        (layout.FLIGHT, layout.FLIGHT_ENTRIES * layout.ENTRY_WORDS),
        (layout.WINDOW, layout.WINDOWS * layout.WINDOW_WORDS),
        (layout.STOP, words.DELIVERED + 1 - layout.STOP),
        (layout.LONGEST_SAVE, 1),
        (layout.PAGE_WORDS, 0),
    ]
    for (start, count), (following, _) in pairwise(records):
        assert start + count <= following


def test_collectives(path: Path) -> None:
    page = StatusPage(path)
    group = page.group("0", [0, 1, 2, 5, 7, 8])
    done = all_reduce(page, group, 1)
    page.end(done, 0.25)
    failed = page.begin(layout.kind_of(group, 12, 4), 2, 5, peer=7)
    page.end(failed, 0.5, has_failed=True)
    running = all_reduce(page, group, 3)
    queued = all_reduce(page, group, 4, is_running=False)
    found = found_at(path)
    assert found.groups == (reading.Group("0", (0, 1, 2, 5, 7, 8), None, None),)
    assert [(one.number, one.state) for one in found.collectives] == [
        *((1, "done"), (2, "failed"), (3, "running"), (4, "queued")),
    ]
    second, third = found.collectives[1:3]
    assert (second.op, second.dtype, second.size, second.peer) == ("recv", "bfloat16", 5, 7)
    assert found.open_collective == third
    assert (found.ended, found.waited) == (2, 0.75)
    assert third.place == reading.CodeLine(__file__, all_reduce.__code__.co_firstlineno + 1, "all_reduce")
    page.end(running, 0.0)
    page.start(queued)
    assert [one.state for one in found_at(path).collectives[2:]] == ["done", "running"]


def test_the_ring_keeps_the_latest_and_an_old_one_changes_nothing(path: Path) -> None:
    page = StatusPage(path)
    group = page.group("0", [0])
    first = all_reduce(page, group, 0, is_running=False)
    for number in range(1, 101):
        page.end(all_reduce(page, group, number), 0.0)
    page.start(first)
    page.end(first, 1.0)
    found = found_at(path)
    assert [one.number for one in found.collectives] == list(range(101 - layout.RING_ENTRIES, 101))
    assert all(one.state == "done" for one in found.collectives)
    assert found.ended == 101
    assert found.waited == 1.0


def test_places_are_used_again(path: Path) -> None:
    """More lines than there is room for: the latest have the right one."""
    page = StatusPage(path)
    group = page.group("0", [0])
    lines = "\n".join("begin()" for _ in range(100))
    exec(compile(lines, "/somewhere/train.py", "exec"), {"begin": lambda: all_reduce(page, group, 0)})
    exec(
        compile(lines, "/elsewhere/train.py", "exec"), {"begin": lambda: page.begin(layout.kind_of(group, 1, 1), 0, 1)}
    )
    # The second lambda is this file's too, so that every entry is a line of this test: what counts is the innermost.
    assert all(one.place is not None and one.place.file == __file__ for one in found_at(path).collectives)
    page.places.never_users([__file__])
    exec(compile(lines, "/elsewhere/train.py", "exec"), {"begin": lambda: all_reduce(page, group, 0)})
    assert [str(one.place) for one in found_at(path).collectives] == [f"train.py:{line}" for line in range(69, 101)]


def test_more_groups_than_there_is_room_for(path: Path) -> None:
    """The first one, which has all ranks, keeps its place. Nobody is taken for another."""
    page = StatusPage(path)
    world = page.group("0", range(8))
    old = page.group("old", [0])
    page.end(all_reduce(page, old, 3), 0.0)
    page.end(all_reduce(page, world, 4), 0.0)
    for number in range(layout.GROUPS - 1):
        page.group(f"new {number}", [number])
    found = found_at(path)
    assert [(one.group, one.number) for one in found.collectives] == [("", 3), ("0", 4)]
    names = [group.name for group in found.groups]
    assert sorted(names) == ["0", *sorted(f"new {number}" for number in range(layout.GROUPS - 1))]
    page.end(all_reduce(page, page.group("old", [0]), 5), 0.0)
    found = found_at(path)
    assert found.collectives[-1].group == "old"
    assert "new 0" not in {group.name for group in found.groups}, "the oldest makes room, not the latest"
    assert page.group("0", range(8)) == world


def test_a_long_list_of_ranks_is_cut_between_two(path: Path) -> None:
    page = StatusPage(path)
    ranks = range(0, 400, 3)
    page.group("0", ranks)
    (group,) = found_at(path).groups
    assert 20 < len(group.ranks) < len(ranks)
    assert group.ranks == tuple(ranks)[: len(group.ranks)]


def test_a_path_that_is_not_utf_8(path: Path) -> None:
    page = StatusPage(path)
    slot = page.places.slot_of("/caf\udce9/train.py", 7, "step")
    page.write_flight(0, layout.kind_of(layout.NO_GROUP, 1, 1), 1, 1, 1.0, 0.0, ("/caf\udce9/train.py", 7, "step"))
    (one,) = found_at(path).collectives
    assert (slot, str(one.place)) == (0, "train.py:7")


def test_places_are_found_by_several_threads_at_once(path: Path) -> None:
    """The loop's, and the one that reads torch's flight recorder."""
    page = StatusPage(path)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(_visit, page, f"/{thread}/train.py") for thread in range(4)]
    finally:
        sys.setswitchinterval(before)
    assert all(one.result() < layout.PLACES for one in made)  # raises what has been raised there


def _visit(page: StatusPage, file: str) -> int:
    return max(page.places.slot_of(file, line, "step") for line in range(5000))


def test_code_that_is_compiled_all_the_time_is_forgotten(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_lines, "_MOST_CODES", 50)
    page = StatusPage(path)
    page.places.never_users([__file__])
    group = page.group("0", [0])
    made = [_compiled(number, lambda: all_reduce(page, group, 0)) for number in range(200)]
    assert 0 < sum(code() is not None for code in made) <= 50
    assert [str(one.place) for one in found_at(path).collectives] == [f"train{n}.py:2" for n in range(168, 200)]


def _compiled(number: int, begin: Callable[[], object]) -> weakref.ref[CodeType]:
    code = compile("\nbegin()", f"/somewhere/train{number}.py", "exec")
    exec(code, {"begin": begin})
    return weakref.ref(code)


def test_the_flight_recorders(path: Path) -> None:
    page = StatusPage(path)
    group = page.group("2", range(4), enqueued=7, completed=6)
    kind = layout.kind_of(group, 2, 1)
    page.write_flight(0, kind, 7, 12, 100.0, 0.0, ("/a/train.py", 12, "step"))
    page.clear_flights(1)
    before = found_at(path).progress
    found = found_at(path)
    assert found.groups == (reading.Group("2", (0, 1, 2, 3), 7, 6),)
    (only,) = found.collectives
    assert (only.group, only.number, only.op, only.state, str(only.place)) == (
        "2",
        7,
        "broadcast",
        "running",
        "train.py:12",
    )
    page.group("2", range(4), enqueued=7, completed=6)
    assert found_at(path).progress == before, "looking is not progress"
    page.group("2", range(4), enqueued=7, completed=7)
    page.clear_flights()
    assert found_at(path).progress != before
    assert found_at(path).collectives == ()


def test_asking(path: Path) -> None:
    page = StatusPage(path)
    assert not page.is_asked(layout.ASKED)
    assert not reading.ask(path, 0.01), "nobody answers"
    assert page.is_asked(layout.ASKED)

    def answer() -> None:
        while not page.is_asked(layout.ASKED):
            pass
        page.answer(layout.ASKED)

    page.answer(layout.ASKED)
    thread = threading.Thread(target=answer)
    thread.start()
    assert reading.ask(path, 10.0)
    thread.join()


def test_as_json(path: Path) -> None:
    page = StatusPage(path)
    all_reduce(page, page.group("0", [0, 1]), 1)
    found = found_at(path)
    assert messages.decode(messages.encode(found), reading.Status, "here") == found
    assert status.read(path) == found, "as docs/diagnose.md does"


def test_what_is_no_page(path: Path) -> None:
    assert reading.read(path) is None
    path.write_bytes(b"phx-stat")
    assert reading.read(path) is None
    path.write_bytes(b"x" * layout.PAGE_BYTES)
    assert reading.read(path) is None
    StatusPage(path)
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)
    assert reading.read(path) is None, "another version"


def test_who_died_while_writing(path: Path) -> None:
    """A record whose ends differ is left out; without the loop's there is nothing to say."""
    page = StatusPage(path)
    group = page.group("0", [0])
    all_reduce(page, group, 1)
    all_reduce(page, group, 2)
    whole = path.read_bytes()
    torn = bytearray(whole)
    torn[(layout.RING + layout.ENTRY_WORDS) * 8] += 1
    path.write_bytes(torn)
    assert [one.number for one in found_at(path).collectives] == [2]
    torn = bytearray(whole)
    torn[layout.LOOP * 8] += 1
    path.write_bytes(torn)
    assert reading.read(path) is None


def test_reading_while_writing(path: Path) -> None:
    """Every record that is found was written like that."""
    page = StatusPage(path)
    group = page.group("0", [0])
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            page.end(page.begin(layout.kind_of(group, 1, 1), number, number), 0.0)
            page.beat(layout.DATA, number, number, number)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            found = found_at(path)
            assert found.epoch == found.step == found.samples
            assert all(one.number == one.size for one in found.collectives)
    finally:
        stop.set()
        thread.join()


def test_where_no_page_can_be_a_rank_goes_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_page, "_own", None)
    own_page.begin(Path("/dev/full"), 0, 1)
    assert own_page.current() is None
    page = StatusPage(tmp_path / "rank-0.status")
    monkeypatch.setattr(own_page, "_own", page)
    assert own_page.current() is page


def test_the_pulse_beats_with_progress_alone(path: Path) -> None:
    assert reading.pulse(path) is None
    page = StatusPage(path)
    group = page.group("0", [0, 1], enqueued=4, completed=3)
    entry = all_reduce(page, group, 1)

    def beats(change: Callable[[], object]) -> bool:
        before, progress = reading.pulse(path), found_at(path).progress
        change()
        assert (reading.pulse(path) != before) == (found_at(path).progress != progress)
        return reading.pulse(path) != before

    assert not beats(lambda: page.group("0", [0, 1], enqueued=5, completed=3))
    assert not beats(lambda: all_reduce(page, group, 2))
    assert not beats(lambda: page.answer(layout.ASKED))
    assert beats(lambda: page.group("0", [0, 1], enqueued=5, completed=4))
    assert beats(lambda: page.end(entry, 0.001))
    assert beats(lambda: page.enter(layout.DATA))


def test_stacks_are_asked_for_by_the_page(path: Path) -> None:
    page = StatusPage(path)
    assert not page.is_asked(layout.STACKS_ASKED)
    assert not reading.ask(path, 0.0, layout.STACKS_ASKED)
    assert page.is_asked(layout.STACKS_ASKED)
    assert not page.is_asked(layout.ASKED)
    page.answer(layout.STACKS_ASKED)
    assert not page.is_asked(layout.STACKS_ASKED)


def test_the_stacks_of_all_other_threads() -> None:
    held, inside = threading.Lock(), threading.Event()

    def wait_for_it() -> None:
        inside.set()
        with held:
            pass

    with held:
        thread = threading.Thread(target=wait_for_it, name="waits for it")
        thread.start()
        inside.wait()
        text = own_page.stacks_of_threads()
    thread.join()
    (found,) = [one for one in from_faulthandler(text) if one.name == "waits for it"]
    assert "wait_for_it" in [line.function for line in found.lines]
    assert "stacks_of_threads" not in text


def test_the_address_of_a_store_is_noted_whole_or_not_at_all(path: Path) -> None:
    page = StatusPage(path)
    for host, noted in (("a" * 42, "a" * 42 + ":29500"), ("a" * 43, "")):
        page.connecting(f"{host}:29500")
        found = reading.read(path)
        assert found is not None
        assert found.connecting == noted
    assert tcp_store.why_unreachable("a" * 48, 1.0) == ""
    assert tcp_store.why_unreachable("a..b:1", 1.0) == "the name a..b cannot be resolved"
