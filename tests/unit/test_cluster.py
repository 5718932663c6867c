"""What each kind of launcher says, and what must not be mistaken for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx import cluster
from phalanx.cluster import slurm
from phalanx.cluster.situation import on_nodes
from phalanx.errors import UsageError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "10",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
    "SLURM_STEP_NODELIST": "node[03-05]",
    "SLURM_JOB_NAME": "train",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_torchrun() -> None:
    found = cluster.find(TORCHRUN)
    assert (found.kind, found.rank, found.world_size, found.local_rank, found.local_size) == ("torchrun", 5, 8, 1, 4)
    assert (found.node, found.nodes, found.master, found.store_is_up) == (1, 2, ("10.0.0.1", 29500), True)


def test_rank_and_world_size_by_hand_mean_one_machine() -> None:
    found = cluster.find({"RANK": "1", "WORLD_SIZE": "2"})
    assert (found.local_rank, found.local_size, found.master, found.store_is_up) == (1, 2, None, False)


def test_slurm_task() -> None:
    found = cluster.find(SRUN)
    assert (found.kind, found.rank, found.world_size, found.local_rank, found.local_size) == ("slurm", 9, 10, 1, 2)
    assert (found.node, found.nodes) == (2, 3)
    assert found.master is not None
    assert found.master[0] == "node03"
    assert found.master == cluster.find({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).master


@pytest.mark.parametrize(
    "difference",
    [
        {"SLURM_STEP_ID": None},  # a batch script: sbatch runs it once, with SLURM_PROCID=0 and SLURM_NTASKS=10
        {"SLURM_STEP_ID": "4294967290"},  # salloc's interactive step
        {"SLURM_PTY_PORT": "4000"},  # srun --pty
    ],
)
def test_a_slurm_shell_is_a_world_of_one(difference: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "has_terminal", lambda: True)
    environ = {name: value for name, value in {**SRUN, **difference}.items() if value is not None}
    found = cluster.find(environ)
    assert (found.kind, found.world_size) == ("single", 1)


@pytest.mark.parametrize(
    "difference",
    [
        {"SLURM_JOB_NAME": "interactive"},  # srun in a shell of salloc
        {"SLURM_JOB_NAME": "bash"},  # srun bash run.sh
        {"SLURM_JOB_NAME": "bash", "SLURM_PTY_PORT": "4000"},  # srun in a shell of srun --pty bash
    ],
)
def test_tasks_that_look_like_a_shell(difference: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "has_terminal", lambda: False)
    found = cluster.find({**SRUN, **difference})
    assert (found.kind, found.rank, found.world_size) == ("slurm", 9, 10)


def test_mpirun_inside_slurm_is_mpirun() -> None:
    """Its daemons are tasks of srun, and its ranks inherit their variables."""
    assert cluster.find({**SRUN, **MPIRUN}).kind == "openmpi"
    assert cluster.find({**SRUN, "PMI_RANK": "9", "PMI_SIZE": "10"}).kind == "slurm", "srun --mpi=pmi2"


def test_torchrun_inside_slurm_is_torchrun() -> None:
    assert cluster.find({**SRUN, **TORCHRUN}).kind == "torchrun"


def test_mpirun_and_pmi() -> None:
    found = cluster.find(MPIRUN)
    assert (found.kind, found.rank, found.world_size, found.local_rank, found.nodes) == ("openmpi", 3, 4, 3, 1)
    assert found.master is not None
    assert found.master[0] == "127.0.0.1"
    pmi = cluster.find({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"})
    assert (pmi.rank, pmi.world_size, pmi.local_rank, pmi.node, pmi.nodes, pmi.master) == (2, 4, 0, 1, 2, None)


def test_nothing_is_a_world_of_one() -> None:
    found = cluster.find({})
    assert (found.kind, found.rank, found.world_size, found.master) == ("single", 0, 1, None)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "world size is 0"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "99999"),
        ({**SRUN, "SLURM_LOCALID": "one"}, "SLURM_LOCALID='one'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "lots"}, "lots"),
    ],
)
def test_a_wrong_variable_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError) as caught:
        cluster.find(environ)
    assert named in str(caught.value)


def test_slurms_lists() -> None:
    assert slurm.hosts("gpu7") == ["gpu7"]
    assert slurm.hosts("gpu7,gpu9") == ["gpu7", "gpu9"]
    assert slurm.hosts("node[003-005,9],x") == ["node003", "node004", "node005", "node9", "x"]
    assert slurm.hosts("rack1-[2,4].lan,x") == ["rack1-2.lan", "rack1-4.lan", "x"]
    assert slurm.hosts("r[1-2]n[09-10]") == ["r1n09", "r1n10", "r2n09", "r2n10"]
    for text in ("", "a,", "a[", "a]", "a[]", "a[x],b", "a[3-1]", "a[1-]", "a b", "a[0-999999999]", "a[0-999][0-999]"):
        with pytest.raises(UsageError, match=r"SLURM's list of hosts .* cannot be read; set MASTER_ADDR"):
            slurm.hosts(text)
    assert slurm.tasks_per_node("4(x2),2") == [4, 4, 2]
    assert slurm.tasks_per_node("") == []


def test_the_hosts_tell_which_ranks_share_a_node() -> None:
    """One process a pod: Kubernetes gives RANK and WORLD_SIZE, and no LOCAL_RANK."""
    found = cluster.find({"RANK": "2", "WORLD_SIZE": "4"})
    assert not found.local_is_known
    assert cluster.find({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}).local_is_known
    places = [on_nodes(replace(found, rank=rank), ["b", "a", "b", "c"]) for rank in range(4)]
    assert [(each.local_rank, each.local_size, each.node, each.nodes) for each in places] == [
        (0, 2, 0, 3),
        (0, 1, 1, 3),
        (1, 2, 0, 3),
        (0, 1, 2, 3),
    ]
    assert all(each.local_is_known for each in places)


def test_the_tasks_that_were_asked_for() -> None:
    assert slurm.allocated_tasks({"SLURM_TASKS_PER_NODE": "3,1", "SLURM_NTASKS": "4"}) == [3, 1]
    assert slurm.allocated_tasks({"SLURM_TASKS_PER_NODE": "8(x2)"}) == [], "the CPUs of --exclusive"
    assert slurm.allocated_tasks({"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "7"}) == [], "of a job around it"
