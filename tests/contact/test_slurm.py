"""More of what happens on a cluster, under a real SLURM: steps and jobs beside each other, arrays, shells, containers.

The small part runs in tests/faults/test_slurm.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx.cluster import slurm
from tests import stopping
from tests.conftest import REPOSITORY
from tests.faults.test_slurm import PHALANX, PLACE, PYTHON, RUN, UNEVEN, batch, places
from tests.slurm_cluster import SlurmCluster, await_that, needs_slurm, slurm_cluster

pytestmark = needs_slurm

EVEN = ["0 4 0 2 0 2 node0 6.0", "1 4 1 2 0 2 node0 6.0", "2 4 0 2 1 2 node1 6.0", "3 4 1 2 1 2 node1 6.0"]
"""Two ranks on each node."""
PAIR = ["0 2 0 2 0 1 node0 1.0", "1 2 1 2 0 1 node0 1.0"]
"""Two ranks on the first node."""
LISTS = ("a", "a,b", "node[0-1]", "n[003-005,9],x", "rack[1-2]n[08-10]", "a[1,3-4],b[07-08],d", "n[8-11]")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PLACE)
    return tmp_path


def test_lists_of_hosts(cluster: SlurmCluster) -> None:
    """SLURM's lists of hosts are read as `scontrol show hostnames` reads them."""
    for text in LISTS:
        assert slurm.hosts(text) == cluster.control("scontrol", "show", "hostnames", text).split()


def test_one_agent_on_each_node(cluster: SlurmCluster, place: Path) -> None:
    """`srun -N2 phalanx run --nproc-per-node 2`, as one starts torchrun, without any address."""
    code, out, err = cluster.run(place, "srun", "-N2", *PHALANX, "--nproc-per-node", "2", "train.py")
    assert code == 0, err
    assert places(out) == [f"{each} shm torchrun" for each in EVEN]


def test_torchruns_flags_under_srun(cluster: SlurmCluster, place: Path) -> None:
    """The flags that people give to torchrun under srun mean the same."""
    static = f"{RUN} --nnodes 2 --node-rank $SLURM_NODEID --master-addr 10.77.0.1 --master-port 29511 train.py"
    elastic = f"{RUN} --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.77.0.1:29512 --rdzv-id $SLURM_JOB_ID train.py"
    for command in (static, elastic):
        code, out, err = cluster.run(place, "srun", "-N2", "bash", "-c", command)
        assert code == 0, err
        assert [each.split()[:2] for each in places(out)] == [["0", "2"], ["1", "2"]]


def test_each_task_alone(cluster: SlurmCluster, place: Path) -> None:
    """`srun -n2 phalanx run --standalone` is two runs."""
    code, out, err = cluster.run(place, "srun", "-n2", *PHALANX, "--standalone", "train.py")
    assert code == 0, err
    assert places(out) == ["0 1 0 1 0 1 node0 0.0 shm torchrun"] * 2


def test_salloc_of_one_node(cluster: SlurmCluster, place: Path) -> None:
    """`phalanx run` in a shell of salloc, which is on the login node, starts on the node of the job."""
    code, out, err = cluster.run(place, "salloc", "-n2", *PHALANX, "train.py")
    assert code == 0, err
    assert places(out) == [f"{each} shm torchrun" for each in PAIR]
    assert "phalanx: SLURM gives the node node0; starting there with srun\n" in err


def test_a_batch_script_fails(cluster: SlurmCluster, place: Path) -> None:
    """A rank's exit code is the job's, and the cause is told once; --nproc-per-node beats SLURM's tasks."""
    script = batch(place, f"exec {RUN} --nproc-per-node 2 train.py 3")
    number = cluster.submit(script, "-N2", "--ntasks-per-node=1")
    assert cluster.wait(number) == "FAILED"
    err = (place / f"{number}.err").read_text()
    assert cluster.show(number)["ExitCode"] == "7:0", err
    assert places((place / f"{number}.out").read_text()) == [f"{each} shm torchrun" for each in EVEN]
    assert err.count("rank 3 failed: sys.exit(7)") == 1


def test_an_exclusive_job_has_one_rank_a_node(cluster: SlurmCluster, place: Path) -> None:
    """With --exclusive and no number of tasks SLURM's variable counts CPUs, which nobody has asked for."""
    number = cluster.submit(batch(place, f"exec {RUN} train.py"), "-N2", "--exclusive")
    assert cluster.wait(number) == "COMPLETED", (place / f"{number}.err").read_text()
    assert len(places((place / f"{number}.out").read_text())) == 2


def test_an_array_of_jobs(cluster: SlurmCluster, place: Path) -> None:
    """The jobs of an array run at once on one node, each in a world of its own."""
    script = batch(place, "srun " + PYTHON + " train.py", f"exec {RUN} train.py")
    array = cluster.submit(script, "--array=0-1", "-n2", "-w", "node0", "--output=array-%a.out")
    for task in range(2):
        assert cluster.wait(f"{array}_{task}") == "COMPLETED"
        found = places((place / f"array-{task}.out").read_text())
        assert found == sorted(f"{each} shm {kind}" for each in PAIR for kind in ("slurm", "torchrun"))


def test_steps_at_once(cluster: SlurmCluster, place: Path) -> None:
    """Steps of one job at once on the same nodes do not meet each other."""
    step = f"srun --overlap -N2 -n3 {PYTHON} train.py"
    tasks = f"srun --overlap -N2 -n3 {RUN} train.py"
    script = batch(
        place, *(f"{command} > {name} &" for name, command in (("a", step), ("b", step), ("c", tasks))), "wait"
    )
    number = cluster.submit(script, "-N2", "-n3")
    assert cluster.wait(number) == "COMPLETED", (place / f"{number}.err").read_text()
    for name, kind in (("a", "slurm"), ("b", "slurm"), ("c", "torchrun")):
        assert places((place / name).read_text()) == [f"{each} shm {kind}" for each in UNEVEN]


def test_a_shell_with_a_terminal(cluster: SlurmCluster, place: Path) -> None:
    """In a shell of `srun --pty`, python is alone, `phalanx run` starts on all nodes, and srun starts tasks."""
    words = f"{PYTHON} train.py; {RUN} train.py; srun --overlap -n2 {PYTHON} train.py"
    (place / "typed").write_text(f"{words}; exit\n")
    command = "sleep 30 | cat typed - | script -qec 'srun -N2 --pty bash' /dev/null"
    _, out, _ = cluster.run(place, "bash", "-c", command)
    found = [each.rstrip("\r").split() for each in places(out)]
    kinds = [
        ("single", "0", "1"),
        ("slurm", "0", "2"),
        ("slurm", "1", "2"),
        ("torchrun", "0", "2"),
        ("torchrun", "1", "2"),
    ]
    assert sorted((each[-1], each[0], each[1]) for each in found) == kinds, out


def test_without_slurms_programs(cluster: SlurmCluster, place: Path) -> None:
    """In a container there are SLURM's variables, and neither srun nor scontrol."""
    (place / "bin").mkdir()
    for name in ("sh", "env", "uname"):
        (place / "bin" / name).symlink_to(str(shutil.which(name)))
    inside = f"env PATH={place}/bin {RUN} train.py"
    code, out, err = cluster.run(place, "srun", "-N2", "sh", "-c", inside)
    assert code == 0, err
    assert [each.split()[:2] for each in places(out)] == [["0", "2"], ["1", "2"]]
    code, _, err = cluster.run(place, "salloc", "-N2", "sh", "-c", inside)
    assert code != 0
    assert "phalanx: srun could not be started: No such file or directory" in err


def test_gpus(tmp_path: Path) -> None:
    """Each rank has a GPU of its own, whether SLURM gives GPUs to nodes or to tasks."""
    show = "import os; print('gpu', *map(os.environ.get, ('RANK', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES')), flush=True)"
    (tmp_path / "show.py").write_text(show)
    (tmp_path / "daemons").mkdir()
    with slurm_cluster(tmp_path / "daemons", gpus=4) as cluster:
        for command, visible in (
            (("salloc", "-N2", "--gpus-per-node=2", *PHALANX, "--nproc-per-node", "auto"), ["0,1", "0,1"]),
            (("salloc", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", *PHALANX), ["0,1", "0,1"]),
            (("srun", "-N2", "--ntasks-per-node=2", "--gpus-per-node=2", *PHALANX), ["0,1", "0,1"]),
            (("srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", *PHALANX), ["0", "1"]),
            (("srun", "-N2", "--ntasks-per-node=2", *PHALANX), ["None", "None"]),
        ):
            code, out, err = cluster.run(tmp_path, *command, "--start-method", "exec", "show.py")
            assert code == 0, err
            expected = [f"{rank} {rank % 2} {visible[rank % 2]}" for rank in range(4)]
            assert sorted(re.findall("gpu (.*)", out)) == expected, command


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI: install openmpi-bin")
def test_mpirun(cluster: SlurmCluster, place: Path) -> None:
    """mpirun starts its daemons with srun, and its ranks are mpirun's; on one machine they get shm."""
    flags = "--allow-run-as-root --oversubscribe -x MASTER_ADDR=10.77.0.1 -x MASTER_PORT=29513"
    script = batch(place, f"mpirun {flags} -n 4 {PYTHON} train.py")
    number = cluster.submit(script, "-N2", "--ntasks-per-node=2")
    assert cluster.wait(number) == "COMPLETED", (place / f"{number}.err").read_text()
    assert places((place / f"{number}.out").read_text()) == [f"{each} shm openmpi" for each in EVEN]
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    assert len(re.findall("1.0 shm openmpi", done.stdout)) == 2


# ---- what ends a job


def stops(cluster: SlurmCluster, place: Path, line: str, *flags: str) -> str:
    """Submits a job that trains on four ranks, and waits until it does."""
    number = cluster.submit(
        batch(stopping.prepare(place), line), "-N2", "--ntasks-per-node=2", "--open-mode=append", *flags
    )
    stopping.await_training(place)
    return number


def ended(cluster: SlurmCluster, number: str, place: Path, state: str, by: str = "SIGTERM") -> str:
    """Waits for the end of the job, checks what it has left, and returns what it printed."""
    found = cluster.wait(number, seconds=150)
    err = (place / f"{number}.err").read_text()
    assert (found, cluster.show(number)["ExitCode"]) == (state, f"{stopping.check(place, err, by)}:0"), err
    return err


@pytest.mark.parametrize("command", [f"exec {RUN} stops.py 1", f"exec srun {RUN} stops.py 1"], ids=["sbatch", "srun"])
def test_a_time_limit(cluster: SlurmCluster, tmp_path: Path, command: str) -> None:
    """The end of a job comes while it trains: SIGTERM twice to each step, once to the batch script."""
    number = stops(cluster, tmp_path, command)
    cluster.end_in(number, 1)
    ended(cluster, number, tmp_path, "TIMEOUT")


def test_the_end_of_a_job_is_known(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The stop begins half a minute before the end of the job, and SLURM need not end it."""
    number = stops(cluster, tmp_path, f"exec {RUN} stops.py 1", "--time=2")
    err = ended(cluster, number, tmp_path, "FAILED", "the end of the SLURM job")
    (left,) = re.findall(r"phalanx: the end of the SLURM job is (\d+) s away: stopping the ranks, in the time", err)
    assert 20 < int(left) <= 30 + 3 * 5


@pytest.mark.parametrize("whom", ["", "B:"], ids=["steps", "batch"])
def test_a_notice(cluster: SlurmCluster, tmp_path: Path, whom: str) -> None:
    """--signal=USR1@60 tells the agents, --signal=B:USR1@60 the conductor; rank 3 takes long to end."""
    number = stops(cluster, tmp_path, f"exec {RUN} stops.py 25", f"--signal={whom}USR1@60")
    cluster.end_in(number, 80)
    ended(cluster, number, tmp_path, "FAILED", "SIGUSR1")


def test_a_notice_that_nobody_wants(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The ranks continue, and a line says so."""
    waits = "import pathlib, time\nwhile not pathlib.Path('told').exists(): time.sleep(0.1)\n"
    (tmp_path / "waits.py").write_text(waits)
    number = cluster.submit(batch(tmp_path, f"exec {RUN} waits.py"), "-N2", "--signal=B:USR1@60")
    err = tmp_path / f"{number}.err"
    await_that(lambda: err.exists() and "2 ranks on 2 hosts" in err.read_text(), "it begins", 110)
    cluster.end_in(number, 100)
    told = "phalanx: SIGUSR1: the script neither handles it nor asks px.stop, so the ranks continue\n"
    await_that(lambda: told in err.read_text(), "the notice", 110)
    (tmp_path / "told").touch()
    assert cluster.wait(number) == "COMPLETED"
    assert err.read_text().count("SIGUSR1") == 1


@pytest.mark.parametrize("again", ["", "--requeue"], ids=["", "requeue"])
def test_a_preemption(tmp_path: Path, again: str) -> None:
    """In its GraceTime the agents alone are told. SLURM does not requeue a job that ends there; --requeue does."""
    (tmp_path / "daemons").mkdir()
    place = tmp_path / "job"
    with slurm_cluster(tmp_path / "daemons", grace_time=60, kill_wait=30) as cluster:
        number = stops(cluster, place, f"exec {RUN} {again} stops.py 25")
        urgent = cluster.submit(batch(tmp_path, "exec true"), "-N2", "--partition=urgent", "--exclusive")
        if not again:
            ended(cluster, number, place, "FAILED")
        else:
            cluster.wait(number, "PENDING")
            err = (place / f"{number}.err").read_text()
            assert stopping.check(place, err) == 143
            assert f"phalanx: job {number} is back in SLURM's queue\n" in err
        assert cluster.wait(urgent) == "COMPLETED"


def test_requeued_by_the_run_itself(cluster: SlurmCluster, tmp_path: Path) -> None:
    """--requeue after a time limit puts the job back; scancel while it waits is the last word."""
    number = stops(cluster, tmp_path, f"exec {RUN} --requeue stops.py 1")
    cluster.end_in(number, 1)
    cluster.wait(number, "PENDING")
    err = (tmp_path / f"{number}.err").read_text()
    assert stopping.check(tmp_path, err) == 143
    assert f"phalanx: job {number} is back in SLURM's queue\n" in err
    cluster.control("scancel", number)
    assert cluster.wait(number) == "CANCELLED"


def test_requeued_by_somebody_else(cluster: SlurmCluster, tmp_path: Path) -> None:
    """--requeue does not put a job back that SLURM has put back already."""
    number = stops(cluster, tmp_path, f"exec {RUN} --requeue stops.py 1")
    cluster.control("scontrol", "requeue", number)
    cluster.wait(number, "PENDING")
    err = (tmp_path / f"{number}.err").read_text()
    assert stopping.check(tmp_path, err) == 143
    assert f"phalanx: job {number} is back in SLURM's queue\n" in err
    cluster.control("scancel", number)
    assert cluster.wait(number) == "CANCELLED"


@pytest.fixture
def example(cluster: SlurmCluster, tmp_path: Path) -> Callable[..., str]:
    """Submits examples/slurm/train.sbatch with flags of `phalanx run` and digits.py; returns the job."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    program = tmp_path / "bin/phalanx"
    program.touch(0o755)

    def submit(*flags: str, run: str = "") -> str:
        # $1 is `run`.
        program.write_text(f'#!/bin/sh\nshift\nexec {PYTHON} -m phalanx run {run} "$@"\n')
        command = ("sbatch", "--parsable", "examples/slurm/train.sbatch", *flags)
        code, out, err = cluster.run(tmp_path, *command, env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
        assert code == 0, err
        return out.strip()

    return submit


def receipt(cluster: SlurmCluster, job: str, place: Path) -> str:
    """Waits for a job, and returns the line about its weights."""
    state = cluster.wait(job)
    log = (place / f"digits-{job}.log").read_text()
    assert state == "COMPLETED", log
    (line,) = re.findall(r"  replicas +equal, checksum \w+", log)
    return line


def test_the_example(cluster: SlurmCluster, example: Callable[..., str], tmp_path: Path) -> None:
    """Requeued in the middle of its training, it ends with the same weights, bit for bit.

    Two tasks on each node are two ranks on each node, although no flag says so.
    """
    epochs = 12
    jobs = [example("--epochs", str(epochs)) for _ in range(2)]
    saved = tmp_path / f"checkpoints/digits-{jobs[1]}"
    await_that(lambda: saved.exists() and len(list(saved.iterdir())) > 1, "it has saved twice", 110)
    cluster.requeue(jobs[1])
    assert receipt(cluster, jobs[0], tmp_path) == receipt(cluster, jobs[1], tmp_path)
    logs = [(tmp_path / f"digits-{job}.log").read_text() for job in jobs]
    assert "phalanx: SLURM gives 2 nodes (node0, node1); starting on all of them with srun\n" in logs[0]
    assert "phalanx: 4 ranks on 2 hosts: node0 0-1, node1 2-3\n" in logs[0]
    ((steps, last),) = re.findall(
        r"stopped by SIGTERM after (\d+) steps; .* the last checkpoint is of step (\d+)", logs[1]
    )
    assert steps == last
    assert 10 < int(steps) < 30 * epochs, "in the middle"
    assert logs[1].count(f" {epochs * 1440} of {epochs * 1440} seen ({epochs} epochs of 1440), 0 twice\n") == 1
