"""phalanx.spawn has mp.spawn's contract, and works where mp.spawn does not."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import phalanx as px
from phalanx.errors import UsageError
from phalanx.launch.agent import attempt_run
from phalanx.launch.spawn import SpawnContext
from phalanx.system import cgroups
from phalanx.testing import ranks as testing
from tests.conftest import free_port


def note(rank: int, directory: Path, queue, event, shared) -> None:
    assert event.wait(5)
    environment = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    (directory / str(rank)).write_text(f"{environment} {multiprocessing.current_process().name}")
    queue.put(rank * 10)
    shared[rank] = rank + 1


def fail(rank: int) -> None:
    if rank == 1:
        raise KeyError("the reason")
    time.sleep(60)


def leave(rank: int, code: int) -> None:
    if rank == 0:
        os._exit(code)
    time.sleep(60)


def die(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_every_rank_runs_the_function_in_a_context_to_join_later(tmp_path: Path) -> None:
    """Queues, events and shared tensors may be passed."""
    import torch

    methods = multiprocessing.get_context("spawn")
    queue, event = methods.Queue(), methods.Event()
    shared = torch.zeros(2).share_memory_()
    context = px.spawn(note, (tmp_path, queue, event, shared), nprocs=2, join=False)
    assert context is not None
    pids = context.pids()
    assert all(psutil.pid_exists(pid) for pid in pids)
    assert context.join(timeout=0.2) is False
    event.set()
    assert context.join(timeout=20) is True
    assert context.join() is True
    assert not any(psutil.pid_exists(pid) for pid in pids)
    for rank in range(2):
        expected = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": None}
        assert (tmp_path / str(rank)).read_text() == f"{expected} SpawnProcess-{rank + 1}"
    assert sorted(queue.get(timeout=5) for _ in range(2)) == [0, 10]
    assert shared.tolist() == [1.0, 2.0]
    queue.close()
    queue.join_thread()


def spawned(fn, args: tuple = (), nprocs: int = 2) -> None:
    """As `px.spawn`, with the helper of `run_ranks`, which is there already."""
    with contextlib.closing(SpawnContext(fn, args, nprocs, daemon=False, zygote=testing._warm_zygote())) as context:
        while not context.join():
            pass


def test_the_exceptions_are_mp_spawns(run_ranks) -> None:
    """`run_ranks` starts its ranks as `spawn` does, from a helper that is there already."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    with pytest.raises(ProcessRaisedException, match="KeyError: 'the reason'") as raised:
        spawned(fail)
    assert raised.value.error_index == 1
    assert "in fail" in str(raised.value)
    assert "phalanx/launch" not in str(raised.value)
    with pytest.raises(ProcessExitedException, match="exit code 7") as left:
        run_ranks(leave, 2, 7, join_group=False)
    assert (left.value.exit_code, left.value.error_index) == (7, 0)
    with pytest.raises(ProcessExitedException, match="signal SIGKILL") as killed:
        run_ranks(die, 2, join_group=False)
    assert (killed.value.exit_code, killed.value.signal_name) == (-9, "SIGKILL")


@pytest.mark.usefixtures("run_ranks")
def test_a_function_without_a_home(tmp_path: Path) -> None:
    """It takes queues and shared tensors too."""
    import torch

    word = "local"
    shared = torch.zeros(2).share_memory_()
    queue = multiprocessing.get_context("spawn").SimpleQueue()

    def work(rank: int, shared, queue) -> None:
        (tmp_path / f"{word}-{rank}").touch()
        shared[rank] = rank + 1
        queue.put(rank)

    spawned(work, (shared, queue))
    assert {path.name for path in tmp_path.iterdir()} == {"local-0", "local-1"}
    assert shared.tolist() == [1.0, 2.0]
    assert sorted(queue.get() for _ in range(2)) == [0, 1]
    queue.close()


def run_script(tmp_path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "main.py").write_text(text)
    command = [sys.executable, *flags, "main.py"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)


@pytest.mark.long
def test_a_script_written_for_mp_spawn_runs_unchanged(tmp_path: Path) -> None:
    """Classes of the script itself travel by name."""
    text = """
import os, sys
import torch, torch.distributed as dist
import {module} as mp

class Settings:
    def __init__(self, word):
        self.word = word

def work(rank, world_size, settings):
    assert type(settings) is Settings and __name__ == "__mp_main__"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "{port}"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.ones(1)
    dist.all_reduce(total)
    sys.stdout.write(f"{{settings.word}} {{rank}} {{int(total)}}\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=({ranks}, Settings("hello")), nprocs={ranks}, join=True)
"""
    # One process of torch's shows that the script is right; each of them imports torch again.
    for module, ranks in (("torch.multiprocessing", 1), ("phalanx", 2)):
        got = run_script(tmp_path, text.format(module=module, ranks=ranks, port=free_port()))
        expected = [f"hello {rank} {ranks}" for rank in range(ranks)]
        assert sorted(got.stdout.splitlines()) == expected, got.stderr


def test_from_an_interactive_session(tmp_path: Path) -> None:
    """A notebook's cells live in a main module without a file, like those of `python -c`."""
    cell = """
import phalanx as px, sys
factor = 3
def cell(rank):
    with px.init() as world:
        sys.stdout.write(f"{rank * factor} of {world.size}\\n")
px.spawn(cell, nprocs=2)
"""
    got = subprocess.run([sys.executable, "-c", cell], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert sorted(got.stdout.splitlines()) == ["0 of 2", "3 of 2"], got.stderr


@pytest.mark.parametrize("daemon", [True, False])
def test_at_the_parents_exit_daemons_end_and_others_are_awaited(daemon: bool, tmp_path: Path) -> None:
    text = f"""
import sys, time, phalanx as px

def work(rank):
    time.sleep(1.0)
    sys.stdout.write("finished\\n")

if __name__ == "__main__":
    px.spawn(work, nprocs=1, join=False, daemon={daemon})
"""
    got = run_script(tmp_path, text)
    assert (got.returncode, got.stdout) == (0, "" if daemon else "finished\n"), got.stderr


def test_the_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        "import time, sys, phalanx as px\n"
        "def work(rank):\n    sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(100)\n"
        "if __name__ == '__main__':\n    px.spawn(work, nprocs=2)\n"
    )
    parent = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    children = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs(children, timeout=1.0)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_ctrl_c_reaches_the_processes(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        """
import sys, time, phalanx as px

def work(rank):
    try:
        sys.stdout.write("up\\n"); sys.stdout.flush()
        time.sleep(100)
    except KeyboardInterrupt:
        sys.stdout.write("interrupted\\n"); sys.stdout.flush()
        raise

if __name__ == "__main__":
    px.spawn(work, nprocs=2)
"""
    )
    parent = subprocess.Popen(
        [sys.executable, "main.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    parent.send_signal(signal.SIGINT)
    out, _ = parent.communicate(timeout=20)
    assert out == "interrupted\n" * 2
    assert parent.returncode == -signal.SIGINT


def test_spawn_inside_a_run_meets_at_its_own_store(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        """
import sys, phalanx as px

def inner(rank):
    with px.init() as world:
        sys.stdout.write(f"inner {world.rank} of {world.size}\\n")

if __name__ == "__main__":
    with px.init() as world:
        px.spawn(inner, nprocs=2)
"""
    )
    command = [sys.executable, "-m", "phalanx", "run", "main.py"]
    got = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert sorted(got.stdout.splitlines()) == ["inner 0 of 2", "inner 1 of 2"], got.stderr


def test_a_parent_without_standard_output(tmp_path: Path) -> None:
    """As a daemon: no file or socket of ours takes its number, which the processes would print to."""
    (tmp_path / "script.py").write_text(
        "import os, pathlib, phalanx as px\n"
        "def note(rank):\n"
        "    pathlib.Path(f'rank-{rank}').write_text(os.readlink('/proc/self/fd/1'))\n"
        "if __name__ == '__main__':\n"
        "    px.spawn(note, nprocs=2)\n"
        "    os.fstat(1)\n"
    )
    command = ["sh", "-c", f"{sys.executable} script.py >&-"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "Bad file descriptor" in ended.stderr, "it is closed again"
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["/dev/null"] * 2


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    """Each new process imports the script; unguarded, that would start processes without end."""
    text = "import phalanx as px\ndef work(rank): pass\npx.spawn(work, nprocs=2)\n"
    got = run_script(tmp_path, text)
    assert got.returncode == 1
    assert "put the call under `if __name__ == '__main__':`" in got.stderr


def test_wrong_values_are_named() -> None:
    with pytest.raises(UsageError, match="nprocs is 0"):
        px.spawn(note, nprocs=0)
    with pytest.raises(UsageError, match="start_method is 'fork'"):
        px.spawn(note, nprocs=1, start_method="fork")


def test_run_ranks_gives_back_results_of_any_size(run_ranks) -> None:
    def much(world: px.World) -> bytes:
        return bytes([world.rank]) * 3_000_000

    assert [len(result) for result in run_ranks(much, 2)] == [3_000_000] * 2


def test_run_ranks_lets_its_ranks_finish(run_ranks, tmp_path: Path) -> None:
    """Their threads are waited for, and what is registered for the end is done."""

    def work(rank: int) -> None:
        import atexit
        import threading

        atexit.register((tmp_path / f"at exit {rank}").touch)
        threading.Timer(0.2, (tmp_path / f"thread {rank}").touch).start()

    run_ranks(work, 2, join_group=False)
    assert {path.name for path in tmp_path.iterdir()} == {"at exit 0", "at exit 1", "thread 0", "thread 1"}


def test_run_ranks_shares_the_cores(run_ranks) -> None:
    def threads(rank: int) -> int:
        import torch

        return torch.get_num_threads()

    assert run_ranks(threads, 2, join_group=False) == [max(1, cgroups.usable_cores() // 2)] * 2


def test_run_ranks_says_when_it_takes_too_long(run_ranks) -> None:
    with pytest.raises(px.PhalanxError, match=r"did not end on all of 2 ranks within 0\.5 s"):
        run_ranks(lambda rank: time.sleep(60), 2, join_group=False, timeout=0.5)
    assert run_ranks(lambda rank: rank, 2, join_group=False) == [0, 1]


def test_a_failure_while_others_are_still_being_started(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are called off before they have started have no pid, and nobody waits for one."""
    from torch.multiprocessing import ProcessRaisedException

    monkeypatch.setattr(attempt_run, "_MOST_STARTING", 1)  # so that most of them have not when the first one fails
    with pytest.raises(ProcessRaisedException, match="too early"):
        run_ranks(fail_at_once, 40, join_group=False)


def fail_at_once(rank: int) -> None:
    raise ValueError("too early")
