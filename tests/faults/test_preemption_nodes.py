"""A scheduler ends a run on two nodes: all ranks stop at the same step, whichever processes it has signalled."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from phalanx.testing import VirtualNodes, virtual_nodes
from tests.conftest import first
from tests.faults.test_many_nodes import agent, at, await_line, ends
from tests.faults.test_preemption import TRAINS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")


@pytest.fixture(scope="module")
def pair() -> Iterator[VirtualNodes]:
    with virtual_nodes(2, loopback_names=True) as nodes:
        yield nodes


def processes_of(agent: int) -> list[int]:
    return [agent, *(child.pid for child in psutil.Process(agent).children(recursive=True))]


@pytest.mark.parametrize(
    ("whom", "how", "name", "code", "why"),
    first(
        2,
        [
            ("every process", "flag", "SIGTERM", 143, "15"),
            ("the agent of node 1", "px.stop", "SIGTERM", 143, "SIGTERM"),
            ("the agent of node 0", "flag", "SIGUSR1", 0, "10"),
            ("rank 3", "saves", "SIGTERM", 143, "15"),
        ],
    ),
)
def test_all_nodes_stop_at_the_same_step(
    whom: str, how: str, name: str, code: int, why: str, pair: VirtualNodes, tmp_path: Path
) -> None:
    flags = [*at(pair), "--nproc-per-node", "2"]
    text = TRAINS.replace("if step == 5:", "if step == 5:\n        print('ready', os.getpid(), flush=True)")
    agents = [agent(node, tmp_path, rank, flags, (how, name, "0.3"), text) for rank, node in enumerate(pair)]
    for each in agents:
        await_line(each, "ready")
        await_line(each, "ready")
    pids = [each.pid for each in agents]
    inside = (tmp_path / "at-1/ready-3").read_text()  # its number in the node's own PID namespace
    rank = [pid for pid in processes_of(pids[1]) if Path(f"/proc/{pid}/status").read_text().count(f"\t{inside}\n")]
    those = {"rank 3": rank, "the agent of node 0": pids[:1], "the agent of node 1": pids[1:]}.get(whom)
    for pid in those or [pid for each in pids for pid in processes_of(each)]:
        os.kill(pid, getattr(signal, name))
    for ended, _, err in ends(agents):
        assert ended == code, err
    texts = [(tmp_path / f"at-{rank // 2}/saved-{rank}").read_text() for rank in range(4)]
    assert len(set(texts)) == 1
    assert re.fullmatch(rf"\d+ {why}\n", texts[0])
    if code:
        reports = [json.loads((tmp_path / f"at-{node}/runs/latest/report.json").read_text()) for node in range(2)]
        assert {report["stop"]["step"] for report in reports} == {int(texts[0].split()[0]) + 1}
