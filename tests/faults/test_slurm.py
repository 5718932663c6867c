"""What users type on a cluster, under a real SLURM on two virtual nodes; tests/contact/test_slurm.py has more of it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import stopping
from tests.slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

pytestmark = needs_slurm

PLACE = """
import os, sys, torch, torch.distributed as dist, phalanx as px
with px.init() as world:
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    own = [world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes, os.uname().nodename]
    print("place", *own, total.item(), world.backend, world.launcher, flush=True)
    if sys.argv[1:] == [str(world.rank)]:
        sys.exit(7)
    dist.barrier()
"""
PYTHON = sys.executable
PHALANX = (PYTHON, "-m", "phalanx", "run")
RUN = " ".join(PHALANX)
UNEVEN = ["0 3 0 2 0 2 node0 3.0", "1 3 1 2 0 2 node0 3.0", "2 3 0 1 1 2 node1 3.0"]
"""Three ranks, two of them on the first node."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PLACE)
    return tmp_path


def batch(place: Path, *lines: str) -> Path:
    script = place / "job.sh"
    script.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    return script


def places(out: str) -> list[str]:
    return sorted(re.findall(r"place (.*)", out))


def test_srun_python_in_salloc(cluster: SlurmCluster, place: Path) -> None:
    """The job of salloc is called `interactive`, and its tasks are no shells. They get shm."""
    code, out, err = cluster.run(place, "salloc", "-N2", "-n3", "srun", PYTHON, "train.py")
    assert code == 0, err
    assert places(out) == [f"{each} shm slurm" for each in UNEVEN]
    assert err.count("phalanx: the backend is shm, not gloo (PHALANX_BACKEND=as-written keeps gloo)") == 1


def test_srun_phalanx_run(cluster: SlurmCluster, place: Path) -> None:
    """The tasks are the ranks of one world; what all of them know is printed once."""
    code, _, err = cluster.run(place, "srun", "-n2", *PHALANX, "--nproc-per-node", "2", "train.py")
    assert code == 2
    assert "srun has started several tasks on a node, and each is asked for 2 processes; leave out" in err
    code, out, err = cluster.run(place, "srun", "-N2", "-n3", *PHALANX, "train.py", "1")
    assert code == 7, err
    assert places(out) == [f"{each} shm torchrun" for each in UNEVEN]
    assert err.count("phalanx: 3 ranks, one in each task of srun\n") == 1
    assert err.count("rank 1 failed: sys.exit(7)") == 1
    (log,) = re.findall(r"traceback and output: (.*)", err)
    assert "place 1 3" in (place / log).read_text(), "the log of another task on this node"


def test_a_stop_that_slurm_asks_for(cluster: SlurmCluster, tmp_path: Path) -> None:
    """scancel signals the conductor and the agents of one job, and the tasks of another: all ranks stop, once."""
    jobs = []
    for name, line in (("conductor", f"exec {RUN} --requeue stops.py 1"), ("tasks", f"exec srun {RUN} stops.py 1")):
        place = stopping.prepare(tmp_path / name)
        jobs.append((place, cluster.submit(batch(place, line), "-N2", "--ntasks-per-node=2")))
    for place, _ in jobs:
        stopping.await_training(place)
    cluster.control("scancel", *(job for _, job in jobs))
    for place, job in jobs:
        assert cluster.wait(job) == "CANCELLED"
        err = (place / f"{job}.err").read_text()
        assert stopping.check(place, err) == 143
        assert cluster.show(job)["ExitCode"] == "143:0", err
        is_told = f"phalanx: job {job} was cancelled, so it is not put back into SLURM's queue\n" in err
        assert is_told == (place.name == "conductor"), err
