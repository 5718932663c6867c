"""One command runs two hosts over ssh, and a signal reaches some of its processes: all ranks save at the same step.

tests/contact/test_orders.py has the other orders, over ssh and srun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests import stopping
from tests.conftest import first
from tests.faults import test_one_command
from tests.faults.test_one_command import Site, await_nothing, end, processes

pytestmark = test_one_command.pytestmark
site = test_one_command.site

ORDERS: dict[str, list[tuple[float, str]]] = {
    "the conductor": [(0, "conductor")],
    "one agent": [(0, "agent 1")],
    "both agents": [(0, "agent 1"), (0, "agent 0")],
    "the ranks of one node": [(0, "ranks 1")],
    "every process but ssh": [(0, "conductor"), (0, "all 0"), (0, "all 1")],
    "every process, reversed": [(0, "all 1"), (0, "all 0"), (0, "conductor")],
    "agents, then the conductor": [(0, "agent 0"), (0, "agent 1"), (1, "conductor")],
    "the conductor, then agents": [(0, "conductor"), (1, "agent 0"), (0, "agent 1")],
    "twice": [(0, "conductor"), (0, "all 0"), (0, "all 1"), (0.2, "conductor"), (0, "all 0"), (0, "all 1")],
    "a rank of each node, later all": [(0, "ranks 1"), (0.5, "all 0"), (0, "conductor")],
}
"""Seconds before each, and who gets SIGTERM."""


def signal_in_order(order: list[tuple[float, str]], conductor: int, agents: list[int], ranks: list[int]) -> None:
    """``agents``: of both nodes; ``ranks``: of the second node."""
    for seconds, whom in order:
        time.sleep(seconds)
        kind, _, node = whom.partition(" ")
        agent = agents[int(node)] if node else conductor
        pids = ranks if kind == "ranks" else [agent]
        if kind == "all":
            pids = [child.pid for child in reversed(psutil.Process(agent).children(recursive=True))] + pids
        for pid in pids:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGTERM)


def pid_here(inside: int, below: int) -> int:
    """The pid of a process of a node, by its pid there."""
    for child in psutil.Process(below).children(recursive=True):
        if Path(f"/proc/{child.pid}/status").read_text().count(f"\t{inside}\n"):
            return child.pid
    raise AssertionError(f"there is no process {inside}")


def stop_over_ssh(site: Site, place: Path, order: list[tuple[float, str]]) -> None:
    stopping.prepare(place)
    process: subprocess.Popen[str] = site.start(
        place, "-H", "node0:2,node1:2", "--shutdown-timeout", "60", "stops.py", "1"
    )
    inside = stopping.await_training(place)
    agents = [processes(node, "phalanx.launch.command.remote")[0] for node in site.nodes[:2]]
    signal_in_order(order, process.pid, agents, [pid_here(pid, agents[1]) for pid in inside[2:]])
    code, _, err = end(process)
    assert code == 143, err
    assert stopping.check(place, err) == 143
    await_nothing(site)


@pytest.mark.parametrize("name", first(1, ["both agents", "every process but ssh"]))
def test_all_hosts_stop_at_the_same_step(name: str, site: Site, tmp_path: Path) -> None:
    stop_over_ssh(site, tmp_path, ORDERS[name])
