"""The agents' side of a stop, with status pages that the test writes as ranks do."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.preemption import words
from phalanx.preemption.agreement import Agreement, NodeVotes
from phalanx.preemption.words import RankWords
from phalanx.status import layout
from phalanx.watchdog.exchange import Exchange

USR1 = int(signal.SIGUSR1)


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[list[RankWords]]:
    """Of two ranks that train and handle SIGUSR1: rank 0 has passed 3 collectives and 9 steps, rank 1 3 and 3."""
    found = []
    for rank, steps in enumerate((9, 3)):
        layout.status_path(tmp_path, rank).write_bytes(bytes(layout.PAGE_BYTES))
        found.append(page := RankWords(tmp_path, rank))
        page[words.CLOCKS[words.COLLECTIVES]], page[words.CLOCKS[words.STOP_POINTS]] = 3, steps
        page[words.HANDLES] = 1 << USR1
    yield found
    for page in found:
        page.close()


@contextlib.contextmanager
def agreement(directory: Path, limit: float) -> Iterator[Agreement]:
    found = Agreement(NodeVotes(directory, range(2), lambda _: False), Exchange(), USR1, "", limit)
    found.turn()
    yield found
    found.close()


def test_optimizer_steps_are_the_clock_only_if_all_ranks_stand_still(pages: list[RankWords], tmp_path: Path) -> None:
    pages[0][words.STANDS_STILL] = 1  # it has two optimizers more
    with agreement(tmp_path, 60.0):
        assert (pages[1][words.CLOCK], pages[1][words.STEP]) == (words.COLLECTIVES, 5)
    pages[1][words.STANDS_STILL] = 1
    with agreement(tmp_path, 60.0):
        assert (pages[1][words.CLOCK], pages[1][words.STEP]) == (words.STOP_POINTS, 11)


def test_a_committed_step_that_a_rank_does_not_reach(pages: list[RankWords], tmp_path: Path) -> None:
    """It is given up; the rank that has stopped there does not get the signal again."""
    with agreement(tmp_path, 0.05) as stop:
        for page in pages:
            page[words.VOTE] = 2 * page[words.EPOCH] + 1
        stop.turn()
        assert (stop.state, pages[0][words.COMMITTED]) == ("committed", 1)
        pages[0][words.DELIVERED] = 1
        stop.turn()
        time.sleep(0.06)
        stop.turn()
        assert (stop.state, stop.stopped) == ("released", {0})
        assert stop.why_released == "a rank has not come to the agreed step within 0.05 s"
        assert [page[words.RELEASED] for page in pages] == [0, 1 << signal.SIGUSR1]
        assert [(page[words.EPOCH], page[words.STEP]) for page in pages] == [(2, 0)] * 2


def test_ranks_that_do_not_train_are_released_for_the_same_reason_everywhere(tmp_path: Path) -> None:
    """The other node once said that a node had not agreed in time."""
    agreements: list[Agreement] = []
    sent: list[tuple[int, bytes]] = []
    for node in range(2):
        exchange = Exchange(node, 0, range(2), publish=lambda topic, body, to_all, node=node: sent.append((node, body)))
        votes = NodeVotes(tmp_path, [node], lambda rank: False)  # a rank without a status page
        agreements.append(Agreement(votes, exchange, USR1, "", 30))
    while any(each.state == "voting" for each in agreements):
        for node, body in sent[:]:
            agreements[1 - node].receive(node, body)
            sent.pop(0)
        for each in agreements:
            each.turn()
    assert [(each.state, each.why_released) for each in agreements] == [("released", "")] * 2
