"""SIGTERM to the processes of one run on two hosts, in every order, over ssh and under a real SLURM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import stopping
from tests.faults import test_preemption_hosts
from tests.faults.test_one_command import Site, processes
from tests.faults.test_preemption_hosts import ORDERS, pid_here, signal_in_order, stop_over_ssh
from tests.faults.test_slurm import RUN, batch
from tests.slurm_cluster import SlurmCluster, await_that, needs_slurm, slurm_cluster

site = test_preemption_hosts.site
pytestmark = [*test_preemption_hosts.pytestmark, *needs_slurm]
AGENT = "phalanx.launch.command.remote"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def without_srun(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.Process(pid).name() != "srun"]


@pytest.mark.parametrize("name", ORDERS)
def test_over_ssh(name: str, site: Site, tmp_path: Path) -> None:
    """Two hosts over ssh: all ranks save at the same step, and nothing is left."""
    stop_over_ssh(site, tmp_path, ORDERS[name])


@pytest.mark.parametrize("name", ORDERS)
def test_over_srun(name: str, cluster: SlurmCluster, tmp_path: Path) -> None:
    """Two nodes of a SLURM job: all ranks save at the same step, and nothing is left.

    SIGTERM to the clients of srun is no part of it: they have SLURM kill their steps at once.
    """
    script = batch(stopping.prepare(tmp_path), f"exec {RUN} stops.py 1")
    job = cluster.submit(script, "-N2", "--ntasks-per-node=2")
    inside = stopping.await_training(tmp_path)
    nodes = cluster.nodes[:2]
    (conductor,) = processes(nodes[0], "phalanx run stops.py")
    agents = [without_srun(processes(node, AGENT))[0] for node in nodes]
    ranks = [pid_here(pid, agents[1]) for pid in inside[2:]]
    signal_in_order(ORDERS[name], conductor, agents, ranks)
    assert cluster.wait(job) == "FAILED"
    err = (tmp_path / f"{job}.err").read_text()
    assert cluster.show(job)["ExitCode"] == "143:0", err
    assert stopping.check(tmp_path, err) == 143
    await_that(lambda: not any(processes(node, "phalanx.launch") for node in nodes), "nothing runs", 20)
