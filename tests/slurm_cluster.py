"""A real SLURM on this machine: two compute nodes and a login node, each a virtual node.

    with slurm_cluster(directory) as cluster:
        cluster.login.run(["srun", "-N2", "-n4", "hostname"], env=cluster.env)
        job = cluster.submit(place / "job.sh", "--nodes=2")
        cluster.control("scancel", job)
        assert cluster.wait(job) == "CANCELLED"

Nothing of the machine's own SLURM is read or written: keys, settings, sockets and states are in the directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from phalanx.testing import Node, VirtualNodes, virtual_nodes

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "munged")
_SECONDS = 110.0  # a machine that runs other tests too may be slow
_PATH = f"{os.environ['PATH']}:/usr/sbin"

needs_slurm = [
    pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root"),
    pytest.mark.skipif(
        not all(shutil.which(name, path=_PATH) for name in _PROGRAMS), reason="needs SLURM: install slurm-wlm and munge"
    ),
]

# More CPUs than there are: jobs of every shape fit at once. A job in `urgent` preempts those in `main`.
_SETTINGS = """
ClusterName=test
SlurmctldHost=node0({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.sock
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=1000,batch_sched_delay=0
ReturnToService=2
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
KillWait={kill_wait}
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
GresTypes=gpu
NodeName=node[0-1] CPUs=8 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_time}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


@dataclass(frozen=True)
class SlurmCluster:
    """The nodes, and the commands of SLURM as a user types them on the login node."""

    nodes: VirtualNodes
    directory: Path
    """Settings, logs and states of the daemons."""

    @property
    def env(self) -> dict[str, str]:
        """What a command of SLURM needs; jobs inherit it."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    @property
    def login(self) -> Node:
        """A node that runs no jobs."""
        return self.nodes[2]

    def control(self, *command: str, check: bool = True) -> str:
        """Runs ``scancel``, ``scontrol`` and the like on the login node; returns what it printed."""
        done = self.login.run(command, env=self.env)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def run(self, place: Path, *command: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        """Runs a command on the login node; returns its exit code, standard output and standard error."""
        done = self.login.run(command, env={**self.env, **(env or {})}, cwd=place, timeout=_SECONDS)
        return done.returncode, done.stdout, done.stderr

    def submit(self, script: Path, *flags: str, env: dict[str, str] | None = None) -> str:
        """Submits a batch script from its own directory, where its output goes to ``ID.out``; returns the job's id."""
        flags = ("--parsable", "--output=%j.out", "--error=%j.err", *flags)
        code, out, err = self.run(script.parent, "sbatch", *flags, str(script), env=env)
        assert code == 0, err
        return out.strip()

    def show(self, job: str) -> dict[str, str]:
        """The fields of ``scontrol show job``, such as JobState, Restarts, EndTime and ExitCode."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.control("scontrol", "show", "job", "--oneliner", job)))

    def requeue(self, job: str, seconds: float = _SECONDS) -> None:
        """Requeues a running job and waits until it runs again, without the two minutes that SLURM waits first."""
        self.control("scontrol", "requeue", job)
        self.wait(job, "PENDING", seconds=seconds)
        self.control("scontrol", "update", f"JobId={job}", "StartTime=now")
        self.wait(job, "RUNNING", seconds=seconds)

    def end_in(self, job: str, seconds: int) -> None:
        """Sets the job's time limit to end in so many seconds; SLURM notices it some seconds later."""
        self.control("scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}")

    def wait(self, job: str, *states: str, seconds: float = _SECONDS) -> str:
        """Waits until the job is in one of the states; by default, until it has ended. Returns its state."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED")
        state = ""

        def is_there() -> bool:
            nonlocal state
            state = self.show(job)["JobState"]
            return state in states if states else state not in running

        await_that(is_there, f"job {job} is {' or '.join(states) or 'over'}", seconds)
        return state


def await_that(what: Callable[[], object], name: str, seconds: float) -> None:
    """For what no event tells."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s: {name}"
        time.sleep(0.05)


@contextlib.contextmanager
def slurm_cluster(
    directory: Path, *, kill_wait: int = 30, grace_time: int = 0, gpus: int = 0
) -> Iterator[SlurmCluster]:
    """Starts two nodes with slurmd (the first with slurmctld too) and a login node, in about two seconds.

    ``kill_wait``: seconds from SIGTERM to SIGKILL; ``grace_time``: seconds from preemption, by a job that is submitted
    with ``--partition=urgent --exclusive``, to the end of a job; ``gpus``: of each node, simulated by other devices.
    """
    with virtual_nodes(3, loopback_names=True) as nodes:
        cluster = SlurmCluster(nodes, directory)
        (directory / "state").mkdir()
        (directory / "munge.key").touch(0o400)
        (directory / "munge.key").write_bytes(os.urandom(1024))
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        devices = [directory / f"gpu{number}" for number in range(gpus)]
        for device in devices:
            os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
        (directory / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        values = {"address": nodes[0].address, "kill_wait": kill_wait, "grace_time": grace_time, "gpus": gpus}
        (directory / "slurm.conf").write_text(_SETTINGS.format(directory=directory, **values))
        # One munged serves all: its socket is a file.
        files = [f"--{kind}-file={directory}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        _start(cluster, 0, "munged", "--foreground", "--force", f"--socket={directory}/munge.sock", *files)
        await_that((directory / "munge.sock").exists, "munged listens", 20)
        _start(cluster, 0, "slurmctld", "-D", "-c")
        await_that(lambda: "UP" in cluster.control("scontrol", "ping", check=False), "slurmctld answers", 20)
        for node in range(2):
            # slurmd ends where it finds a cgroup file system that it cannot use.
            nodes[node].run(["mount", "-t", "tmpfs", "none", "/sys/fs/cgroup"], check=True)
            _start(cluster, node, "slurmd", "-D", "-N", nodes[node].name)
        await_that(lambda: cluster.control("sinfo", "-hp", "main", "-o", "%D %t") == "2 idle\n", "nodes are idle", 30)
        yield cluster


def _start(cluster: SlurmCluster, node: int, *command: str) -> None:
    """Starts a daemon, without the mark by which the leak police knows the processes of a test."""
    program = shutil.which(command[0], path=_PATH)
    assert program is not None
    with (cluster.directory / f"{command[0]}.{node}.out").open("w") as file:
        env = {**cluster.env, "PHALANX_TEST": ""}
        cluster.nodes[node].start([program, *command[1:]], env=env, stdin=-3, stdout=file, stderr=file)
