"""Runs on several nodes: they meet, or say why not; they fail together, with one cause; nobody is stuck."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from phalanx.testing import Node, VirtualNodes, virtual_nodes
from tests.conftest import WITHOUT_TORCH

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")

SUM = """
import os, sys, time, torch, torch.distributed as dist, phalanx as px
with px.init() as world:
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    place = [world.rank, world.size, world.local_rank, world.local_size, world.node]
    print("place", *place, attempt, total.item(), flush=True)
    what, who = (sys.argv[1 + 2 * attempt:] + ["", ""])[:2]
    if what == "raise" and world.rank == int(who):
        raise ValueError("on purpose")
    if what == "die" and world.rank == int(who):
        os.kill(os.getpid(), 9)
    for step in range(int(who) if what == "steps" else 0):
        dist.all_reduce(total)
        print("step", time.time(), flush=True)
        time.sleep(0.1)
    dist.barrier()
"""
"""What to do, and who or how often: two words for each attempt."""

STEPS = """
import os, time
print("place", os.environ["RANK"], flush=True)
while True:
    print("step", time.time(), flush=True)
    time.sleep(0.1)
"""
"""For what the agents do by themselves: ranks that never talk to each other, and need no torch."""


@pytest.fixture(scope="module")
def pair() -> Iterator[VirtualNodes]:
    """For tests that leave the nodes as they were. Names stand for loopback, as Debian has it."""
    with virtual_nodes(2, loopback_names=True) as nodes:
        yield nodes


def agent(
    node: Node, place: Path, rank: int, flags: Sequence[str], script: Sequence[str], text: str = SUM
) -> subprocess.Popen[str]:
    directory = place / f"at-{rank}"
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(text)
    command = [sys.executable, "-m", "phalanx", "run", "--node-rank", str(rank), *flags, "train.py", *script]
    return node.start(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)


def at(nodes: VirtualNodes, port: int = 29500, count: int = 2) -> list[str]:
    return ["--nnodes", str(count), "--master-addr", nodes[0].address, "--master-port", str(port)]


def start_all(nodes: VirtualNodes, place: Path, sizes: Sequence[int], *script: str, flags: Sequence[str] = ()):
    return [
        agent(node, place, rank, [*at(nodes), "--nproc-per-node", str(size), *flags], script)
        for rank, (node, size) in enumerate(zip(nodes, sizes, strict=True))
    ]


def start_stepping(
    nodes: VirtualNodes, place: Path, *, with_torch: bool, flags: Sequence[str] = (), awaited: bool = True
) -> list[subprocess.Popen[str]]:
    """Two nodes of a rank each that runs until it is ended; returned when both do."""
    text, words = (SUM, ("steps", "6000")) if with_torch else (STEPS, ())
    flags = flags if with_torch else [*flags, *WITHOUT_TORCH]
    agents = [
        agent(node, place, rank, [*at(nodes), "--nproc-per-node", "1", *flags], words, text)
        for rank, node in enumerate(nodes)
    ]
    if awaited:
        for each in agents:
            await_line(each, "place")
    return agents


def ends(agents: Sequence[subprocess.Popen[str]], timeout: float = 60.0) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    found = []
    for each in agents:
        out, err = each.communicate(timeout=timeout)
        found.append((each.returncode, out, err))
    return found


def places(outputs: Sequence[tuple[int, str, str]], attempt: int = 0) -> list[list[str]]:
    lines = [line for _, out, _ in outputs for line in re.findall(rf"place (\d+ \d+ \d+ \d+ \d+ {attempt} \S+)", out)]
    return sorted(line.split() for line in lines)


def await_line(process: subprocess.Popen[str], text: str, stream: str = "stdout") -> None:
    for line in getattr(process, stream):
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}")


def await_file(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


# ---- meeting


def test_nodes_of_different_size_meet_restart_and_fail_together(pair: VirtualNodes, tmp_path: Path) -> None:
    flags = ["--max-restarts", "1", "--secret-file", str(secret_file(tmp_path / "secret"))]
    outputs = ends(start_all(pair, tmp_path, [2, 1], "die", "2", "raise", "0", flags=flags))
    check_cause(outputs, 0)
    for _, _, err in outputs:
        assert "rank 2 failed: SIGKILL" in err
        assert "starting again, attempt 2 of 2" in err
        assert "timed out" not in err
        assert "Exception" not in err
        assert "is trusted" not in err
    for attempt in ("0", "1"):
        assert places(outputs, int(attempt)) == [
            ["0", "3", "0", "2", "0", attempt, "3.0"],
            ["1", "3", "1", "2", "0", attempt, "3.0"],
            ["2", "3", "0", "1", "1", attempt, "3.0"],
        ]


@pytest.mark.parametrize(
    ("flags", "rank", "text"),
    [
        (["--master-addr", "nowhere.invalid"], 1, "the master's name 'nowhere.invalid' cannot be resolved"),
        (["--master-addr", "node0"], 0, "resolves to 127.0.1.1, which other machines cannot reach"),
        (["--master-addr", "203.0.113.7"], 0, "no network of this machine leads to 203.0.113.7"),
        (["--master-addr", "127.0.0.1"], 1, "needs --master-addr"),
        (["--interface", "eth9"], 1, "--interface eth9 does not exist or has no address; there are lo, eth0"),
    ],
    ids=["name", "loopback", "unroutable", "no address", "interface"],
)
def test_why_they_do_not_meet(flags: list[str], rank: int, text: str, pair: VirtualNodes, tmp_path: Path) -> None:
    """Before anything is started, in a sentence; what may pass is waited for."""
    flags = ["--rdzv-timeout", "1", *flags]
    ended = ends([agent(pair[rank], tmp_path, rank, [*at(pair), *WITHOUT_TORCH, *flags], [])], 20)
    check_refusal(ended[0], text)


def check_refusal(ended: tuple[int, str, str], text: str) -> None:
    code, out, err = ended
    assert code != 0
    assert text in err
    assert "Traceback" not in err
    assert out == ""


def test_waiting_in_vain(pair: VirtualNodes, tmp_path: Path) -> None:
    """Node 0 for node 1, and node 1, at another port, for a master."""
    flags = ["--rdzv-timeout", "1", *WITHOUT_TORCH]
    agents = [agent(pair[rank], tmp_path, rank, [*at(pair, port=29510 + rank), *flags], []) for rank in (0, 1)]
    alone, nobody_there = ends(agents, 30)
    check_refusal(alone, "after 1 s node 1 of 2 has not come")
    check_refusal(nobody_there, "nobody listens there")


def test_a_second_node_zero(pair: VirtualNodes, tmp_path: Path) -> None:
    """On the same machine, for another one cannot have the address."""
    first = agent(pair[0], tmp_path, 0, [*at(pair), *WITHOUT_TORCH], [])
    await_run_directory(tmp_path / "at-0")
    second = agent(pair[0], tmp_path, 0, [*at(pair), *WITHOUT_TORCH], [])
    assert "port 29500 is taken by" in second.communicate(timeout=30)[1]
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)


def await_run_directory(place: Path) -> None:
    """What is made when the port has been taken."""
    while not (place / "runs/latest").exists():
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--max-restarts", "3"], r"has --max-restarts \d, but node \d \(host node\d, .*\) has \d; give all"),
        (["--rdzv-id", "other"], "another run uses this port"),
    ],
    ids=["restarts", "another run"],
)
def test_nodes_that_do_not_belong_together(flags: list[str], text: str, pair: VirtualNodes, tmp_path: Path) -> None:
    common = [*at(pair), *WITHOUT_TORCH]
    agents = [agent(pair[rank], tmp_path, rank, [*common, *(flags if rank else [])], []) for rank in (0, 1)]
    for code, _, err in ends(agents):
        assert code != 0
        assert re.search(text, err), err


def test_nodes_with_different_secrets(pair: VirtualNodes, tmp_path: Path) -> None:
    """Each side says so, and neither waits longer than for a node that does not come. Two pairs at once."""
    agents = []
    for port, secrets in ((29510, ("a", "b")), (29511, ("a", None))):
        for rank, name in enumerate(secrets):
            flags = [*at(pair, port=port), "--rdzv-timeout", "6", *WITHOUT_TORCH]
            if name is not None:
                flags += ["--secret-file", str(secret_file(tmp_path / name))]
            (tmp_path / str(port)).mkdir(exist_ok=True)
            agents.append(agent(pair[rank], tmp_path / str(port), rank, flags, []))
    for rank, ended in zip((0, 1, 0, 1), ends(agents, 60), strict=True):
        check_refusal(ended, "give all nodes the same --secret-file")
        said = "with another secret, or without one" if rank == 0 else "have different secrets, or one of them has none"
        assert said in ended[2]


def secret_file(path: Path) -> Path:
    path.write_text(path.name * 32)
    path.chmod(0o600)
    return path


def test_an_interrupt_while_waiting_for_the_others(pair: VirtualNodes, tmp_path: Path) -> None:
    """At once, whatever the time left; the leak police sees that nothing waits on. Each node waits for the other."""
    agents = [agent(pair[rank], tmp_path, rank, [*at(pair, port=29510 + rank), *WITHOUT_TORCH], []) for rank in (0, 1)]
    for waiting in agents:
        await_line(waiting, "waiting for", "stderr")
    for waiting in agents:
        waiting.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert [waiting.wait(20) for waiting in agents] == [130, 130]
    assert time.monotonic() - began < 7
    for waiting in agents:
        waiting.communicate()


def test_the_reference_experiment_on_two_nodes(tmp_path: Path) -> None:
    """32 × 32 × 4 = 4096 samples an epoch, as on one node."""
    script = Path(__file__).parents[2] / "examples/two_nodes.sh"
    environment = {**os.environ, "PYTHON": sys.executable, "PET_LOG_DIR": str(tmp_path)}
    done = subprocess.run([script, "--max-epochs", "1"], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    ranks = re.findall(r"^\[rank (\d)\] Rank (\d) \| Epoch 0 \| Batchsize 32 \| Steps 32$", done.stdout, re.MULTILINE)
    assert sorted(ranks) == [(str(rank), str(rank)) for rank in range(4)]
    assert "4 ranks on 2 nodes (2 on each); this is node 1" in done.stderr


# ---- failing together


def test_one_cause_on_every_console(pair: VirtualNodes, tmp_path: Path) -> None:
    """Rank 2, on the second node; how it is with rank 0, see above."""
    outputs = ends(start_all(pair, tmp_path, [2, 1], "raise", "2"))
    check_cause(outputs, 2)
    for _, _, err in outputs:
        assert "the nodes share no secret, so everybody on their network is trusted" in err


def check_cause(outputs: Sequence[tuple[int, str, str]], who: int) -> None:
    """Of 2 + 1 ranks."""
    host = "node0" if who == 0 else "node1"
    others = [rank for rank in range(3) if rank != who]
    for code, _, err in outputs:
        assert code == 1
        assert f"phalanx: rank {who} failed: ValueError: on purpose" in err
        assert f"rank {who} of 3, host {host}, pid" in err
        assert 'raise ValueError("on purpose")' in err
        assert f"ranks {others[0]}, {others[1]} fell with it" in err
    assert f"output: {host}:" in outputs[1 if who == 0 else 0][2], "the other console says where the log is"


def test_a_signal_on_node_zero_stops_all(pair: VirtualNodes, tmp_path: Path) -> None:
    interrupt(0, start_stepping(pair, tmp_path, with_torch=False, flags=["--max-restarts", "1"]))


def test_a_link_is_cut_for_three_seconds_and_a_signal_on_node_one_stops_all(pair: VirtualNodes, tmp_path: Path) -> None:
    """They go on after the cut."""
    agents = start_stepping(pair, tmp_path, with_torch=True, flags=["--max-restarts", "1"])
    pair.cut(1)
    time.sleep(3)
    restored_at = time.time()
    pair.restore(1)
    for each in agents:
        await_step(each, restored_at)
    interrupt(1, agents)


def await_step(process: subprocess.Popen[str], after: float) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if (found := re.match(r".*step (\S+)", line)) and float(found[1]) > after:
            return
    raise AssertionError("ended without another step")


def interrupt(who: int, agents: list[subprocess.Popen[str]]) -> None:
    """For good: it is no fault, so the restart that is left is not made."""
    agents[who].send_signal(signal.SIGINT)
    outputs = ends(agents, 20)
    assert outputs[who][0] == 130
    assert "SIGINT: stopping the ranks" in outputs[who][2]
    assert outputs[1 - who][0] == 130
    assert "SIGINT on another node: stopping the ranks" in outputs[1 - who][2]
    assert not any("starting again" in err for _, _, err in outputs)


@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_agent(who: int, pair: VirtualNodes, tmp_path: Path) -> None:
    """With the store's node the ranks lose the store; how they lose one another, see test_nodes_come_and_go."""
    agents = start_stepping(pair, tmp_path, with_torch=who == 0)
    agents[who].kill()
    started = time.monotonic()
    agents[who].communicate(timeout=20)
    code, _, err = ends([agents[1 - who]], 30)[0]
    assert code == 1
    assert f"node {who} (host node{who}, {pair[who].address}) is lost: " in err
    assert time.monotonic() - started < 8


@pytest.mark.long
def test_a_link_that_is_cut_for_good_and_a_node_without_power(tmp_path: Path) -> None:
    """Both ways, and each way alone, at the same time: most of it is waiting. All that can end, and say why."""
    with contextlib.ExitStack() as stack:
        agents: dict[str, list[subprocess.Popen[str]]] = {}
        networks = {}
        for fate in ("both", "in", "out", "dark"):
            networks[fate] = stack.enter_context(virtual_nodes(2))
            (tmp_path / fate).mkdir()
            # What the ranks notice of it is the same in all; the agents have to see each case by themselves.
            with_torch = fate == "both"
            agents[fate] = start_stepping(networks[fate], tmp_path / fate, with_torch=with_torch, awaited=False)
        for each in itertools.chain(*agents.values()):
            await_line(each, "place")
        networks["dark"].stop(1)
        for way in ("both", "in", "out"):
            networks[way].cut(1, way)
        for way in ("both", "in", "out"):
            for rank, (code, _, err) in enumerate(ends(agents[way], 60)):
                assert code == 1, way
                assert f"node {1 - rank} (host node{1 - rank}" in err, way
                assert "is lost" in err, way
        (code, _, err), _ = ends(agents["dark"])
    assert code == 1
    assert "node 1 (host node1" in err
    assert "is lost: there has been no sign of life for 10 s" in err
