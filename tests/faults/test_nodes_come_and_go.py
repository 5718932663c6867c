"""``--rdzv-backend c10d``: nodes meet at an endpoint, get their numbers there, and come and go between attempts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing import Node, VirtualNodes, virtual_nodes
from tests.conftest import WITHOUT_TORCH
from tests.faults.test_many_nodes import agent, await_file, await_line, ends, places

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")

UNTIL_TOLD = """
import os, time, torch, torch.distributed as dist, phalanx as px
with px.init() as world:
    total = torch.zeros(1)
    place = [world.rank, world.size, world.local_rank, world.local_size, world.node]
    print("place", *place, os.environ["TORCHELASTIC_RESTART_COUNT"], 0, flush=True)
    while total.item() == 0:
        time.sleep(0.05)
        total = torch.tensor([1.0 if os.path.exists("finish") else 0.0])
        dist.all_reduce(total)
        if os.path.exists("fail"):
            os.remove("fail")
            raise ValueError("on purpose")
"""


@pytest.fixture(scope="module")
def three() -> Iterator[VirtualNodes]:
    """Names stand for loopback, as Debian has it: torchrun's c10d does not survive that."""
    with virtual_nodes(3, loopback_names=True) as nodes:
        yield nodes


def at(node: Node, count: str, *more: str) -> list[str]:
    return ["--nnodes", count, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{node.address}:29400", *more]


def join(nodes: VirtualNodes, number: int, place: Path, flags: Sequence[str], text: str | None = None):
    """An agent on this node; ``text``: its script."""
    started = agent(nodes[number], place, number, flags, [])
    if text is not None:  # the agent has imported nothing yet, and the zygote imports torch before the script is read
        (place / f"at-{number}/train.py").write_text(text)
    return started


def test_numbers_are_given_at_an_endpoint(three: VirtualNodes, tmp_path: Path) -> None:
    """The endpoint is the second node, which is not the one that gets number 0."""
    flags = at(three[1], "2", "--rdzv-id", "job7")
    agents = [
        agent(three[1], tmp_path, 1, [*flags, "--nproc-per-node", "2"], []),
        agent(three[0], tmp_path, 0, [*flags, "--nproc-per-node", "1"], []),
    ]
    outputs = ends(agents)
    assert [code for code, _, _ in outputs] == [0, 0], outputs
    assert places(outputs) == [
        ["0", "3", "0", "1", "0", "0", "3.0"],
        ["1", "3", "0", "2", "1", "0", "3.0"],
        ["2", "3", "1", "2", "1", "0", "3.0"],
    ]
    for _, _, err in outputs:
        assert "3 ranks on 2 nodes (1 + 2)" in err


@pytest.mark.long
def test_a_lost_node_is_left_out_and_a_late_one_taken_in(three: VirtualNodes, tmp_path: Path) -> None:
    flags = at(three[0], "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3")
    first, second = (join(three, number, tmp_path, flags, UNTIL_TOLD) for number in (0, 1))
    await_line(first, "place 0 2 0 1 0 0")
    second.kill()
    await_line(first, "place 0 1 0 1 0 1")
    late = join(three, 2, tmp_path, flags, UNTIL_TOLD)
    await_line(late, "the run continues with 1 node; waiting for its next restart", "stderr")
    (tmp_path / "at-0/fail").touch()
    await_line(first, "place 0 2 0 1 0 2")
    await_line(late, "place 1 2 0 1 1 2")

    later = join(three, 1, tmp_path, flags, UNTIL_TOLD)
    await_line(later, "the run continues with 2 nodes; waiting for its next restart", "stderr")
    for number in (0, 2):
        (tmp_path / f"at-{number}/finish").touch()
    (code, _, err), (late_code, _, _), (later_code, _, later_err) = ends([first, late, later])
    assert (code, late_code, later_code) == (0, 0, 0), (err, later_err)
    assert (
        "node 1 (host node1, 10.77.0.2) is lost: its agent has ended or was killed; starting again, attempt 2 of 5 "
        "(lost nodes count for --max-preemptions, no limit)" in err
    )
    assert "1 rank on 1 node" in err
    assert re.search(r"rank 0 failed: ValueError: on purpose.*; starting again, attempt 3 of 5", err)
    assert "the run has ended with exit code 0 before this node could take part" in later_err
    second.communicate()


def test_without_the_endpoint_nobody_goes_on(tmp_path: Path) -> None:
    with virtual_nodes(2) as nodes:
        flags = at(nodes[0], "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3")
        agents = [join(nodes, number, tmp_path, flags, UNTIL_TOLD) for number in (0, 1)]
        for each in agents:
            await_line(each, "place")
        nodes.stop(0)
        _, (code, _, err) = ends(agents, 60)
    assert code == 1
    assert "node 0 (host node0, 10.77.0.1) is lost: its store " in err


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--rdzv-timeout", "2"], "after 2 s 1 of 2 nodes has come"),
        (["--rdzv-endpoint", "node0:29400"], "'node0' resolves to 127.0.1.1"),
        (["--rdzv-endpoint", ":29400"], "is not HOST or HOST:PORT"),
    ],
    ids=["alone", "loopback", "endpoint"],
)
def test_why_they_do_not_meet(flags: list[str], text: str, three: VirtualNodes, tmp_path: Path) -> None:
    """Each within seconds, in a sentence."""
    ((code, _, err),) = ends([agent(three[0], tmp_path, 0, [*at(three[0], "2", *WITHOUT_TORCH), *flags], [])], 20)
    assert code != 0
    assert text in err
    assert "Traceback" not in err


def test_a_node_that_does_not_belong_is_sent_away(three: VirtualNodes, tmp_path: Path) -> None:
    """Within seconds; the one that was there first waits on."""
    waiting = agent(three[0], tmp_path, 0, at(three[0], "2", "--rdzv-id", "a", *WITHOUT_TORCH), [])
    await_line(waiting, "waiting for 1", "stderr")
    newcomers = [
        agent(three[1], tmp_path, 1, at(three[0], "1:2", "--rdzv-id", "a", *WITHOUT_TORCH), []),
        agent(three[2], tmp_path, 2, at(three[0], "2", "--rdzv-id", "b", *WITHOUT_TORCH), []),
    ]
    texts = [r"has --nnodes 1:2, but host node0 \(10.77.0.1\) has 2; give all", "another run uses this port"]
    for (code, _, err), text in zip(ends(newcomers, 30), texts, strict=True):
        assert code != 0
        assert re.search(text, err), err
        assert "Traceback" not in err
    assert waiting.poll() is None
    waiting.send_signal(signal.SIGINT)
    assert ends([waiting], 30)[0][0] == 130


SERVICES = """
import http.server, socket, threading
silent = socket.create_server(("", 29411))
talking = http.server.HTTPServer(("", 29412), http.server.SimpleHTTPRequestHandler)
print("up", flush=True)
talking.serve_forever()
"""


def test_another_service_on_the_port(three: VirtualNodes, tmp_path: Path) -> None:
    """One that says nothing, seen from its own machine, and one that says something else, seen from another."""
    other = three[0].start([sys.executable, "-c", SERVICES], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        await_line(other, "up")
        agents = {}
        for who, port in enumerate((29411, 29412)):
            flags = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{three[0].address}:{port}"]
            agents[port] = agent(three[who], tmp_path, who, [*flags, *WITHOUT_TORCH], [])
        outputs = dict(zip(agents, ends(list(agents.values()), 40), strict=True))
    finally:
        other.kill()
        other.communicate()
    for port, (code, _, err) in outputs.items():
        assert code != 0
        assert f"10.77.0.1:{port} answers, but not as a store" in err
        assert "is another program on that port?" in err


def test_agents_of_torchrun_are_refused(three: VirtualNodes, tmp_path: Path) -> None:
    """In either order; they would wait for each other's words for ever."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "10.77.0.2"]
    waiting = agent(three[0], tmp_path, 0, at(three[0], "2", *WITHOUT_TORCH), [])
    await_file(tmp_path / "at-0/runs/latest/keeper.log")
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    stranger = three[1].start([*torchrun, *at(three[0], "2"), "train.py"], cwd=tmp_path, **pipes)
    try:
        ((code, _, err),) = ends([waiting], 60)
    finally:
        stranger.kill()
        stranger.wait()
    assert code == 1
    assert "an agent of torchrun takes part in the rendezvous 'none'" in err
    assert "start all nodes with `phalanx run`" in err
