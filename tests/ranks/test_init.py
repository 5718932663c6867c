"""px.init and px.World: every way to meet, and what is wrong named within seconds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import phalanx as px
from phalanx.errors import JoinError, MasterUnreachable, UsageError
from tests.conftest import Runner, free_port, start

RunRanks = Callable[..., list[Any]]

JOIN = """
import sys
import phalanx as px
import torch, torch.distributed as dist
with px.init() as world:
    total = torch.tensor(float(world.rank + 1))
    dist.all_reduce(total)
    sys.stdout.write(f"{world.rank} {world.size} {int(total)} {world.launcher}{chr(10)}")
"""


@dataclass(frozen=True)
class Part:
    """A process that no launcher has started: its variables, and what it gives to px.init."""

    arguments: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    own_store: str | None = None
    """The file of a store that it makes itself."""


def play(rank: int, parts: tuple[Part, ...], environ: dict[str, str]) -> tuple[str, float]:
    """In a process of its own: what came of joining, and the seconds it took."""
    import torch
    import torch.distributed as dist

    part = parts[rank]
    os.environ.clear()  # of all that the helper behind `run_ranks` has set
    os.environ.update({**environ, **part.env})
    arguments = part.arguments
    if part.own_store is not None:
        arguments = {**arguments, "store": dist.FileStore(part.own_store, len(parts))}
    began = time.monotonic()
    try:
        with px.init(**arguments) as world:
            total = torch.tensor(float(world.rank + 1))
            dist.all_reduce(total)
            text = f"{world.rank} {world.size} {int(total)} {world.launcher}"
    except px.PhalanxError as error:
        text = f"{type(error).__name__} {error}"
    return text, time.monotonic() - began


def together(run_ranks: RunRanks, *parts: Part) -> tuple[list[str], float]:
    """What each says that came of joining, and how long the slowest took."""
    results = run_ranks(play, len(parts), parts, dict(os.environ), join_group=False)
    return [text for text, _ in results], max(seconds for _, seconds in results)


def at(init_method: str, world_size: int, rank: int, timeout: float = 30.0) -> Part:
    return Part({"init_method": init_method, "world_size": world_size, "rank": rank, "timeout": timeout})


def on_port(port: int | None = None) -> str:
    return f"tcp://127.0.0.1:{port or free_port()}"


def test_nothing_at_all_is_a_world_of_one(tmp_path: Path) -> None:
    """A plain interpreter."""
    (tmp_path / "train.py").write_text(JOIN)
    assert start("train.py", cwd=tmp_path).communicate(timeout=40)[0] == "0 1 1 single\n"


def test_variables_set_by_hand(run_ranks: RunRanks) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    out, _ = together(run_ranks, *(Part(env={"RANK": str(rank), **common}) for rank in range(2)))
    assert out == ["0 2 3 torchrun", "1 2 3 torchrun"]


def test_tcp_with_rank_and_size_given(run_ranks: RunRanks) -> None:
    where = on_port()
    out, _ = together(run_ranks, *(at(where, 3, rank) for rank in range(3)))
    assert out == [f"{rank} 3 6 single" for rank in range(3)]


def test_file(run_ranks: RunRanks, tmp_path: Path) -> None:
    out, _ = together(run_ranks, *(at(f"file://{tmp_path}/meet", 2, rank) for rank in range(2)))
    assert out == ["0 2 3 single", "1 2 3 single"]


def test_a_store_of_ones_own(run_ranks: RunRanks, tmp_path: Path) -> None:
    parts = (Part({"world_size": 2, "rank": rank}, own_store=f"{tmp_path}/own") for rank in range(2))
    out, _ = together(run_ranks, *parts)
    assert out == ["0 2 3 single", "1 2 3 single"]


def test_slurm_and_mpi_variables(run_ranks: RunRanks) -> None:
    tasks = slurm_tasks(range(2), 77, MASTER_PORT=str(free_port()))
    assert together(run_ranks, *tasks)[0] == ["0 2 3 slurm", "1 2 3 slurm"]
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    ranks = [
        Part(env={"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), **sizes})
        for rank in range(2)
    ]
    assert together(run_ranks, *ranks)[0] == ["0 2 3 openmpi", "1 2 3 openmpi"]


def slurm_tasks(ranks: Sequence[int], job: int, **common: str) -> list[Part]:
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    step |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0", "MASTER_ADDR": "localhost", **common}
    return [
        Part({"timeout": 5.0}, env={"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), **step}) for rank in ranks
    ]


def test_another_job_on_the_same_port(run_ranks: RunRanks) -> None:
    """Its first rank cannot serve there, and its others come to this job's store."""
    common = {"MASTER_PORT": str(free_port())}
    others = [task for job in (78, 79, 80) for task in slurm_tasks([1], job, **common)]
    found, _ = together(run_ranks, *others, *slurm_tasks(range(2), 77, **common))
    assert found[-2:] == ["0 2 3 slurm", "1 2 3 slurm"]
    assert all("Error" in other for other in found[:-2])


def find_backends(rank: int, parts: tuple[Part, ...], environ: dict[str, str]) -> tuple[str, str, str]:
    """In a process of its own: the backend of the world, the name that torch gives it, and that of a later group."""
    import torch.distributed as dist

    from phalanx import backends

    os.environ.clear()
    os.environ.update({**environ, **parts[rank].env})
    with px.init(**parts[rank].arguments) as world:
        later = dist.new_group([0, 1])
        assert isinstance(later, dist.ProcessGroup)
        return world.backend, dist.get_backend(), backends.name_of(later)


def test_tasks_of_slurm_get_shm(run_ranks: RunRanks) -> None:
    """All or none of them: one that keeps gloo is enough; and a script's own choice stays."""
    for change, expected in (
        (Part(), ("shm", "gloo", "shm")),
        (Part(env={"PHALANX_BACKEND": "as-written"}), ("gloo", "gloo", "gloo")),
        (Part({"backend": "gloo"}), ("gloo", "gloo", "gloo")),
    ):
        tasks = slurm_tasks(range(2), 77, MASTER_PORT=str(free_port()))
        tasks[1] = Part({**tasks[1].arguments, **change.arguments}, {**tasks[1].env, **change.env})
        found = run_ranks(find_backends, 2, tuple(tasks), dict(os.environ), join_group=False)
        assert found == [expected] * 2


def test_torchrun_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"]
    got = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted(got.stdout.splitlines()) == ["0 2 3 torchrun", "1 2 3 torchrun"]


def test_the_world_under_phalanx(phalanx: Runner, script) -> None:
    name = script(
        """
        import phalanx as px
        world = px.init(seed=7)
        import torch, random
        px.print(world.rank, world.size, world.local_rank, world.local_size, world.node, world.nodes)
        print(world.is_main, world.device, world.backend, torch.initial_seed(), len(world.claims))
        world.close()
        world.close()
        with px.init() as again:
            print("again", again.size)
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "2", name)
    assert outcome.code == 0, outcome.err
    assert "[rank 0] 0 2 0 2 0 1" in outcome.lines
    assert {"[rank 0] True cpu shm 7 2", "[rank 1] False cpu shm 7 2"} <= set(outcome.lines)
    assert {"[rank 0] again 2", "[rank 1] again 2"} <= set(outcome.lines)


def test_two_ranks_the_same(run_ranks: RunRanks) -> None:
    where = on_port()
    out, seconds = together(run_ranks, *(at(where, 3, rank) for rank in (0, 1, 1)))
    assert all(text.startswith("RanksDisagree two processes claim one rank: rank 1 (host ") for text in out), out
    assert seconds < 15


def test_world_sizes_that_differ(run_ranks: RunRanks) -> None:
    where = on_port()
    out, seconds = together(run_ranks, at(where, 2, 0), at(where, 3, 1))
    for text in out:
        assert text.startswith("RanksDisagree"), out
        assert "world size 3, but rank 0" in text or "world size 2, but rank 1" in text
    assert seconds < 15


def test_a_rank_that_never_comes_is_named(run_ranks: RunRanks) -> None:
    where = on_port()
    out, seconds = together(run_ranks, at(where, 3, 0, timeout=2), at(where, 3, 2, timeout=2))
    assert all(text == "JoinError waited 2 s for 1 of 3 ranks that have not come: 1" for text in out), out
    assert seconds < 15


def test_nobody_listens(run_ranks: RunRanks) -> None:
    port = free_port()
    (text,), seconds = together(run_ranks, at(on_port(port), 2, 1, timeout=1))
    assert text.startswith(f"MasterUnreachable the master 127.0.0.1:{port} was not reached within 1 s: nobody listens")
    assert seconds < 12


def test_something_else_listens(run_ranks: RunRanks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (text,), seconds = together(run_ranks, at(on_port(port), 2, 1, timeout=1))
    assert text.startswith(f"MasterUnreachable 127.0.0.1:{port} answers, but not as a store"), text
    assert seconds < 20


def test_a_port_that_is_taken_on_rank_zero(run_ranks: RunRanks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (text,), _ = together(run_ranks, at(on_port(port), 2, 0))
    assert text.startswith(f"JoinError rank 0 cannot serve 127.0.0.1:{port}: port {port} is taken by pid {os.getpid()}")


def test_a_stale_file(run_ranks: RunRanks, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/meet"
    (text,), _ = together(run_ranks, at(where, 2, 1, timeout=1))  # waits for rank 0 in vain, and leaves the file
    assert text.startswith("JoinError")
    out, seconds = together(run_ranks, at(where, 2, 0, timeout=2), at(where, 2, 1, timeout=2))
    assert any(text.startswith("StaleStore the store remembers rank 1") for text in out), out
    assert all(text.startswith(("StaleStore", "JoinError")) for text in out), out
    assert seconds < 15


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 does not exist in a world of 2"),
        ({"rank": 1}, "rank=1 was given without a world size"),
        ({"world_size": 2}, "world_size=2 was given without a rank"),
        ({"rank": 0, "world_size": 2}, "set MASTER_ADDR and MASTER_PORT"),
        ({"init_method": "tcp://127.0.0.1", "rank": 0, "world_size": 2}, "'tcp://127.0.0.1' has no port"),
        ({"init_method": "http://x:1", "rank": 0, "world_size": 2}, "'http://x:1' is unknown"),
        ({"init_method": "file:///no/such/place/x", "rank": 0, "world_size": 2}, "/no/such/place/x"),
        ({"backend": "mpi"}, "built without MPI"),
        ({"backend": "nccl"}, "'nccl' needs a CUDA device"),
        ({"backend": "smoke"}, "'smoke' is unknown"),
        ({"device": "cuda"}, "torch sees 0 GPU(s)"),
        ({"device": "abacus"}, "'abacus' is unknown"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, named: str) -> None:
    with pytest.raises(UsageError, match=None) as caught:
        px.init(**arguments)
    assert named in str(caught.value)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(MasterUnreachable, match=r"no\.such\.host\.invalid:29500 was not reached within 1 s: its name"):
        px.init(init_method="tcp://no.such.host.invalid:29500", rank=1, world_size=2, timeout=1)


def test_joining_twice_is_refused(run_ranks: RunRanks) -> None:
    def again(world: px.World) -> str:
        try:
            px.init()
        except UsageError as error:
            return str(error)
        return "joined twice"

    assert run_ranks(again, 1)[0].startswith("the process group exists already")


def test_an_exception_inside_does_not_hang_the_others(phalanx: Runner, script) -> None:
    name = script(
        """
        import phalanx as px, torch, torch.distributed as dist
        with px.init() as world:
            if world.rank == 1:
                raise LookupError("gone")
            dist.all_reduce(torch.ones(1))
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "2", name)
    assert outcome.complaint[0] == "phalanx: rank 1 failed: LookupError: gone"
    assert outcome.seconds < 30


def test_the_timeout_is_the_groups(run_ranks: RunRanks) -> None:
    def wait_in_vain(rank: int) -> float:
        import torch
        import torch.distributed as dist

        with px.init(timeout=timedelta(seconds=1)):
            began = time.monotonic()
            if rank == 0:
                with pytest.raises(RuntimeError):
                    dist.recv(torch.ones(1), src=1)
            return time.monotonic() - began

    waited = run_ranks(wait_in_vain, 2, join_group=False)
    assert waited[0] < 10


def test_meeting_is_checked_even_with_a_store_that_lies(run_ranks: RunRanks) -> None:
    """A store that another rank zero has signed already is refused, not joined."""

    def claim_twice(rank: int) -> str:

        import torch.distributed as dist

        from phalanx.store.join import meet

        store = dist.HashStore()
        prefix = dist.PrefixStore("phalanx/world-0/join", store)
        prefix.add("taken/0", 1)
        prefix.set("claim/0", '{"rank": 0, "world_size": 1, "host": "elsewhere", "pid": 1, "born": 0, "machine": "x"}')
        try:
            meet(store, 0, 1, 5.0, hosted_here=False)
        except JoinError as error:
            return str(error)
        return "joined"

    assert (
        "two processes claim one rank: rank 0 (host elsewhere, pid 1)" in run_ranks(claim_twice, 1, join_group=False)[0]
    )
