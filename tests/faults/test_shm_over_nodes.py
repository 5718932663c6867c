"""The backend shm on hosts with networks of their own: chosen by `phalanx run`, right, and plain about what is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing import VirtualNodes, virtual_nodes
from tests.faults.test_many_nodes import at, await_line

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root"), pytest.mark.beside_others]

TRAIN = """
import json, os, psutil, signal, torch, torch.distributed as dist, phalanx as px
from torch.nn.parallel import DistributedDataParallel
from phalanx import shm

STEPS, EACH, WIDTH = 5, 4, 200

def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

def model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers).double()

def differences(world):
    torch.manual_seed(1)
    data = torch.randn(STEPS, world.size, EACH, WIDTH, dtype=torch.float64)
    alone = train(model(), data.flatten(1, 2))
    found = {}
    # With options of gloo's own it is gloo.
    gloo = dist.new_group(backend="gloo", pg_options=dist.ProcessGroupGloo._Options())
    assert type(gloo) is dist.ProcessGroup
    for name, group in (("world", dist.group.WORLD), ("gloo", gloo)):
        # Buckets of 0.1 MB: some are sent by the leaders at once, some by each rank to its peers.
        wrapped = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.1)
        found[name] = train(wrapped, data[:, world.rank])
    return [(found["world"] - other).abs().max().item() for other in (alone, found["gloo"])]

attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
torch.set_num_threads(1)
if attempt == "1" and rank == 2:
    shm.why_not_here = lambda: "the shm library is not there: no compiler"
with px.init() as world:
    said = {"rank": rank, "backend": world.backend, "differences": differences(world)}
    mine = [each for each in psutil.net_connections("tcp") if each.pid == os.getpid() and each.status == "LISTEN"]
    said["listens at"] = sorted({each.laddr.ip for each in mine})
    print("trained", attempt, json.dumps(said), flush=True)
    if attempt == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its agent may hear of the loss first, and end it
        dist.barrier()
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(100_000))
        except px.PhalanxError as error:
            print("lost", json.dumps([rank, type(error).__name__, str(error)]), flush=True)
            raise
"""

CUT = """
import json, os, socket, time, torch, torch.distributed as dist, phalanx as px
from phalanx.shm.hierarchical import leader_links
from phalanx.store import failure_flag

# As it is, but two seconds instead of fifteen, and half a second instead of three.
failure_flag._ANSWER_TIMEOUT = 0.5
ones = dict.fromkeys([socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT], 1)
leader_links._ALIVE = {**ones, socket.TCP_USER_TIMEOUT: 2000}
torch.set_num_threads(1)
world = px.init("shm")
assert (world.nodes, world.launcher) == (2, "torchrun")
dist.all_reduce(torch.ones(100_000))
print("ready", flush=True)
try:
    while True:
        began = time.monotonic()
        dist.all_reduce(torch.ones(100_000))
except dist.DistBackendError as error:
    print(json.dumps([type(error).__name__, str(error), time.monotonic() - began]), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def pair() -> Iterator[VirtualNodes]:
    with virtual_nodes(2, loopback_names=True) as nodes:
        yield nodes


Ends = list[tuple[int, str, str]]
"""Exit code, output and errors of each node's agent."""


@pytest.fixture(scope="module")
def ends(pair: VirtualNodes, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Two ranks on one node and one on the other. They train, rank 2 is killed, and all start again with gloo."""
    agents = []
    for rank, (node, size) in enumerate(zip(pair, (2, 1), strict=True)):
        place = tmp_path_factory.mktemp(f"at-{rank}")
        (place / "train.py").write_text(textwrap.dedent(TRAIN))
        flags = [*at(pair), "--node-rank", str(rank), "--nproc-per-node", str(size), "--max-restarts", "1"]
        flags += ["--preload", "torch._dynamo"]  # which DDP imports: once a node, not in every rank
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        agents.append(node.start([sys.executable, "-m", "phalanx", "run", *flags, "train.py"], cwd=place, **pipes))
    found = [(*agent.communicate(timeout=90), agent.returncode) for agent in agents]
    return [(code, out, err) for out, err, code in found]


def said(ends: Ends, pattern: str) -> list[Any]:
    return [json.loads(text) for _, out, _ in ends for text in re.findall(rf"{pattern} (.*)", out)]


@pytest.mark.parametrize(("attempt", "backend"), [(0, "shm"), (1, "gloo")])
def test_training_equals_one_process_and_gloo(attempt: int, backend: str, ends: Ends) -> None:
    found = said(ends, f"trained {attempt}")
    assert sorted((each["rank"], each["backend"]) for each in found) == [(rank, backend) for rank in range(3)], ends
    for each in found:
        # The same numbers in double precision, added up in another order: by node, in the batch, around gloo's ring.
        assert max(each["differences"]) < 1e-13


def test_the_choice_is_said_once_and_is_the_same_everywhere(ends: Ends) -> None:
    (_, _, first), (_, _, second) = ends
    assert first.count("the backend is shm, not gloo: shared memory within each of 2 nodes, gloo between them") == 1
    reason = "the backend is gloo on all nodes: rank 2 (host node1): the shm library is not there: no compiler"
    assert first.count(reason) == 1
    assert "the backend is" not in second


def test_nothing_listens_but_on_the_network_of_the_nodes(pair: VirtualNodes, ends: Ends) -> None:
    for each in said(ends, "trained 0"):
        assert each["listens at"] == [pair[each["rank"] // 2].address]


def test_a_rank_that_is_lost_on_the_other_node_is_named(ends: Ends) -> None:
    found = sorted(said(ends, "lost"))
    assert [rank for rank, _, _ in found] == [0, 1]
    for _, kind, text in found:
        assert kind == "PeerLost"
        assert re.match(r"rank 2 \(host node1, pid \d+\) has ended ", text), text
    for code, _, err in ends:
        assert code == 0
        assert "rank 2 failed: SIGKILL" in err


def test_a_cut_link_is_noticed_on_both_sides(pair: VirtualNodes, tmp_path: Path) -> None:
    """Without our agents, which would notice it first: by name, with torchrun's variables.

    One of the nodes has the store, and the other one loses it.
    """
    (tmp_path / "cut.py").write_text(textwrap.dedent(CUT))
    ranks = []
    for rank, (node, local, size) in enumerate([(0, 0, 1), (1, 0, 2), (1, 1, 2)]):
        place = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size}
        place |= {"GROUP_RANK": node, "GROUP_WORLD_SIZE": 2}
        env = {name: str(value) for name, value in place.items()}
        env |= {"MASTER_ADDR": pair[0].address, "MASTER_PORT": "29501", "GLOO_SOCKET_IFNAME": "eth0"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        ranks.append(pair[node].start([sys.executable, "cut.py"], cwd=tmp_path, env=env, **pipes))
    for rank in ranks:
        await_line(rank, "ready")
    pair.cut(1)
    began = time.monotonic()
    outputs = [rank.communicate(timeout=40)[0] for rank in ranks]
    pair.restore(1)
    assert time.monotonic() - began < 15
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert [kind for kind, _, _ in found] == ["PeerLost"] * 3, outputs
    assert re.match(r"rank 1 \(host node1, pid \d+\) has ended or cannot be reached", found[0][1])
    assert re.match(r"rank 0 \(host node0, pid \d+\) has ended or cannot be reached", found[1][1])
    # Its leader cannot tell it by the store, which is on the other side.
    assert re.match(r"rank 2 \(host node1, pid \d+\) has lost contact with the other nodes", found[2][1])
