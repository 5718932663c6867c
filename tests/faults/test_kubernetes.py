"""The manifests of examples/kubernetes/ on virtual nodes: the variables, the late names and the signals of their pods.

Each pod has a network, a host name and processes of its own, and its command is pid 1. A name that the cluster makes is
a line in /etc/hosts, which appears after the pods have begun to wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.testing import Node, virtual_nodes
from tests.conftest import REPOSITORY, WITHOUT_TORCH

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")

PLACES = """
import os
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK".split()
print("place", *(os.environ[name] for name in names), flush=True)
"""
TRAIN_TO_THE_SIGNAL = f"""{PLACES}
import signal, sys, time
def save(number, frame):
    print("saved", os.environ["RANK"], flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
while True:
    time.sleep(0.05)
"""
JOIN = """
import phalanx as px, torch, torch.distributed as dist
with px.init() as world:
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total)
    print("place", world.rank, world.size, world.local_rank, world.local_size, world.node, total.item(), flush=True)
"""


def manifest(file: str) -> dict[str, dict[str, Any]]:
    text = (REPOSITORY / "examples/kubernetes" / file).read_text()
    return {document["kind"]: document["spec"] for document in yaml.safe_load_all(text)}


@dataclass
class Pod:
    """A container: its output as it comes, and its exit code."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    code: int | None = None

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.lines.extend(iter(output.readline, ""))

    def await_lines(self, word: str, count: int = 1) -> None:
        deadline = time.monotonic() + 60.0
        while len(self.printed(word)) < count:
            assert time.monotonic() < deadline, "".join(self.lines)
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.05)

    def stop(self) -> None:
        """As the kubelet does: SIGTERM to pid 1 alone."""
        (first,) = psutil.Process(self.process.pid).children()
        first.send_signal(signal.SIGTERM)

    def end(self, seconds: float = 60.0) -> None:
        self.code = self.process.wait(seconds)
        self._reader.join()

    def printed(self, word: str) -> list[str]:
        return sorted(line.partition(word)[2].strip() for line in list(self.lines) if word in line)


@dataclass
class Cluster:
    place: Path
    pods: list[Pod] = field(default_factory=list)

    def start(self, node: Node, command: Sequence[str], script: str, env: Mapping[str, str]) -> Pod:
        """Starts the command of a manifest as pid 1; ``script`` is what it finds as train.py."""
        home = self.place / node.name
        home.mkdir()
        (home / "train.py").write_text(script)
        programs = {"phalanx": [sys.executable, "-m", "phalanx"], "python": [sys.executable]}
        words = [*programs[command[0]], *command[1:]]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": home}
        inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *words]
        variables = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PYTHONUNBUFFERED": "1", **env}
        self.pods.append(Pod(node.start(inside, env=variables, **pipes)))
        return self.pods[-1]


def know(nodes: Sequence[Node], name: str, address: str) -> None:
    """Makes a name, as the cluster's DNS does."""
    for node in nodes:
        node.run(["sh", "-c", f"echo {address} {name} >> /etc/hosts"], check=True)


def without_checkpoints(arguments: Sequence[str]) -> list[str]:
    return [*arguments[: arguments.index("train.py") + 1]]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Pod]]]:
    """All manifests at once, on two nodes each: most of the time is waiting."""
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(virtual_nodes(6))
        cluster = Cluster(tmp_path_factory.mktemp("pods"))
        found = {
            "trainjob": start_trainjob(cluster, nodes[0:2]),
            "job": start_job(cluster, nodes[2:4]),
            "pytorchjob": start_pytorchjob(cluster, nodes[4:6]),
        }
        for pod in (*found["job"], found["pytorchjob"][1]):
            pod.await_lines("waiting")
        know(nodes[2:4], "digits-0.digits", nodes[2].address)
        know(nodes[4:6], "digits-master-0", nodes[4].address)
        for pod in found["job"]:
            pod.await_lines("place", 2)
        for pod in found["job"]:
            pod.stop()
        for pod in cluster.pods:
            pod.end()
        yield found


def start_trainjob(cluster: Cluster, nodes: Sequence[Node]) -> list[Pod]:
    """The variables are those of Trainer's plugin for torch, the names those of JobSet."""
    trainer = manifest("trainjob.yaml")["TrainJob"]["trainer"]
    know(nodes, "digits-node-0-0.digits", nodes[0].address)
    assert trainer["numNodes"] == len(nodes)
    started = []
    for rank, node in enumerate(nodes):
        env = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "digits-node-0-0.digits",
            "PET_MASTER_PORT": "29500",
            "JOB_COMPLETION_INDEX": str(rank),
        }
        command = [*trainer["command"], *WITHOUT_TORCH, *without_checkpoints(trainer["args"])]
        started.append(cluster.start(node, command, PLACES, env))
    return started


def start_job(cluster: Cluster, nodes: Sequence[Node]) -> list[Pod]:
    (container,) = manifest("job.yaml")["Job"]["template"]["spec"]["containers"]
    command = [*container["command"], *WITHOUT_TORCH, *without_checkpoints(container["args"])]
    return [
        cluster.start(node, command, TRAIN_TO_THE_SIGNAL, {"JOB_COMPLETION_INDEX": str(index)})
        for index, node in enumerate(nodes)
    ]


def start_pytorchjob(cluster: Cluster, nodes: Sequence[Node]) -> list[Pod]:
    """One process in each pod, without a launcher, by the variables that the operator sets."""
    started = []
    for rank, node in enumerate(nodes):
        env = {"MASTER_ADDR": "digits-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": str(rank)}
        env |= {"PET_MASTER_ADDR": "digits-master-0", "PET_MASTER_PORT": "23456", "PET_NODE_RANK": str(rank)}
        started.append(cluster.start(node, ["python", "train.py"], JOIN, {**env, "PET_NNODES": "2"}))
    return started


def test_a_trainjob_starts_by_its_variables(pods: dict[str, list[Pod]]) -> None:
    first, second = pods["trainjob"]
    assert (first.code, second.code) == (0, 0), first.lines + second.lines
    assert first.printed("place") == ["0 4 0 2 0", "1 4 1 2 0"]
    assert second.printed("place") == ["2 4 0 2 1", "3 4 1 2 1"]


def test_the_pods_of_a_job_wait_for_their_names_and_end_by_sigterm(pods: dict[str, list[Pod]]) -> None:
    first, second = pods["job"]
    for pod in (first, second):
        waiting = "waiting, 300 s at most: the master's name 'digits-0.digits' cannot be resolved"
        assert sum(waiting in line for line in pod.lines) == 1
        assert pod.code == 143
    assert first.printed("place") == ["0 4 0 2 0", "1 4 1 2 0"]
    assert second.printed("place") == ["2 4 0 2 1", "3 4 1 2 1"]
    assert (first.printed("saved"), second.printed("saved")) == (["0", "1"], ["2", "3"])


def test_one_process_in_each_pod_is_one_on_each_node(pods: dict[str, list[Pod]]) -> None:
    first, second = pods["pytorchjob"]
    assert (first.code, second.code) == (0, 0), first.lines + second.lines
    assert (first.printed("place"), second.printed("place")) == (["0 2 0 1 0 3.0"], ["1 2 0 1 1 3.0"])
    waiting = "waiting for the master digits-master-0:23456 for 5 s: its name cannot be resolved"
    assert any(waiting in line for line in second.lines), second.lines
