"""A scheduler ends a run: whichever processes it signals, in whatever order, the ranks save."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import WITHOUT_TORCH, Runner, first, start

SCRIPT = """
import multiprocessing, os, signal, sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        return torch.tensor([float(index)])

def helper():
    time.sleep(600)

def train():
    dist.init_process_group("gloo")
    rank, flag = dist.get_rank(), torch.zeros(1)
    def stop(number, frame):
        flag.fill_(1)
    signal.signal(signal.SIGTERM, stop)
    multiprocessing.get_context("fork").Process(target=helper, daemon=True).start()
    batches = iter(DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1]))
    for number, batch in enumerate(batches):
        wanted = flag.clone()
        dist.all_reduce(wanted)
        if wanted.item():
            break
        if number == 3:
            open(f"ready-{rank}", "w").write(str(os.getpid()))
        time.sleep(0.005)
    begun = time.monotonic()
    while time.monotonic() < begun + float(sys.argv[2]):
        next(batches)  # the loader serves as long as its rank wants
        time.sleep(0.01)
    assert all(child.is_alive() for child in multiprocessing.active_children())
    open(f"saved-{rank}", "w").close()

if __name__ == "__main__":
    train()
"""


class Run:
    """A run of two ranks with two loader workers and another helper each, once all of them work."""

    def __init__(
        self,
        directory: Path,
        name: str,
        *arguments: str,
        flags: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self.process = start(
            "-m", "phalanx", "run", "--nproc-per-node", "2", *flags, name, *arguments, cwd=directory, env=env
        )
        paths = [directory / f"ready-{rank}" for rank in range(2)]
        limit = time.monotonic() + 60
        while not all(path.exists() and path.read_text() for path in paths):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < limit, "the ranks did not begin"
            time.sleep(0.02)
        self.agent = self.process.pid
        self.ranks = [int(path.read_text()) for path in paths]
        self.every = [self.agent, *(child.pid for child in psutil.Process(self.agent).children(recursive=True))]
        below = [psutil.Process(rank).children(recursive=True) for rank in self.ranks]
        self.helpers = [child.pid for children in below for child in children]

    def end(self) -> tuple[int, list[int], str]:
        """The exit code, the ranks that have saved, and what phalanx printed."""
        _, err = self.process.communicate(timeout=60)
        saved = [rank for rank in range(2) if (self._directory / f"saved-{rank}").exists()]
        return self.process.returncode, saved, err


def signal_all(pids: list[int], number: int = signal.SIGTERM) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.parametrize("method", first(1, ["fork", "spawn", "forkserver"]))
def test_every_process_is_signalled_and_the_ranks_save(method: str, script, tmp_path: Path) -> None:
    run = Run(tmp_path, script(SCRIPT), method, "0.5")
    signal_all(list(reversed(run.every)))
    code, saved, err = run.end()
    assert (code, saved) == (143, [0, 1]), err


TRAINS = """
import os, random, signal, sys, time
import torch, torch.distributed as dist
from torch import nn

how, number, seconds = sys.argv[1], getattr(signal, sys.argv[2]), float(sys.argv[3])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
flag = []

def save(why):
    dist.barrier()  # a handler that runs at another step would hang here
    time.sleep(seconds)
    with open(f"saved-{rank}", "a") as file:
        file.write(f"{step} {why}\\n")

def handle(number, frame):
    if how == "saves":
        save(number)
    flag.append(number)

if how != "px.stop":
    assert signal.signal(number, handle) == signal.SIG_DFL
    assert signal.getsignal(number) is handle
    stopped = lambda: flag
else:
    import phalanx as px
    stopped = lambda: px.stop.requested
for step in range(100_000):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    if stopped():
        break
    optimizer.zero_grad()
    if step == 5:
        open(f"ready-{rank}", "w").write(str(os.getpid()))
    if how == "px.stop" and number == signal.SIGALRM and step == 20 and rank == 1:
        px.stop.request("the loss is good")
    time.sleep(random.random() * 0.02)
if how != "saves":
    save(px.stop.reason if how == "px.stop" else flag[0])
"""
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("how", "name", "whom", "moments", "flags", "code", "why"),
    first(
        4,
        [
            ("saves", "SIGTERM", "every", (0.0, 0.2), (), 143, TERM),
            ("px.stop", "SIGTERM", "every", (0.0,), ("--backend", "as-written"), 143, "SIGTERM"),
            ("px.stop", "SIGUSR1", "agent", (0.0,), (), 138, "SIGUSR1"),
            ("px.stop", "SIGALRM", "nobody", (), (), 0, "the loss is good"),
            ("flag", "SIGTERM", "every", (0.0, 0.2), (), 143, TERM),
            ("flag", "SIGTERM", "agent", (0.0, 0.0), ("--backend", "as-written"), 143, TERM),
            ("px.stop", "SIGINT", "agent", (0.0,), (), 130, "SIGINT"),
            ("flag", "SIGTERM", "rank 1", (0.0,), (), 143, TERM),
            ("flag", "SIGUSR1", "every", (0.0,), (), 0, USR1),
        ],
    ),
)
def test_all_ranks_stop_at_the_same_step(
    how: str,
    name: str,
    whom: str,
    moments: tuple[float, ...],
    flags: tuple[str, ...],
    code: int,
    why: object,
    script,
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, script(TRAINS), how, name, "0.3", flags=flags)
    those = {"every": run.every, "agent": [run.agent], "rank 1": run.ranks[1:], "nobody": []}[whom]
    for moment in moments:
        time.sleep(moment)  # as slurmd, which signals a step twice
        signal_all([pid for pid in reversed(those) if psutil.pid_exists(pid)], getattr(signal, name))
    ended, saved, err = run.end()
    assert (ended, saved) == (code, [0, 1]), err
    texts = [(tmp_path / f"saved-{rank}").read_text() for rank in saved]
    assert texts[0] == texts[1], err
    assert [line.split(maxsplit=1)[1] for line in texts[0].splitlines()] == [str(why)]
    stop = json.loads((tmp_path / "runs/latest/report.json").read_text())["stop"]
    if code:
        assert (stop["by"], stop["step"]) == (name, int(texts[0].split()[0]) + 1)
        assert f"stopped by {name} after {stop['step']} steps; all ranks have ended by themselves" in err


def test_ranks_that_are_about_to_train_stop_at_their_first_step(script, tmp_path: Path) -> None:
    """Rank 0 waits in its first backward for rank 1, which has not begun: handlers with a barrier would not meet."""
    begin = "open(f'ready-{rank}', 'w').write(str(os.getpid())); time.sleep(rank)\n"
    run = Run(tmp_path, script(TRAINS.replace("for step in", f"{begin}for step in")), "saves", "SIGTERM", "0")
    time.sleep(0.3)
    signal_all(run.every)
    code, saved, err = run.end()
    assert (code, saved) == (143, [0, 1]), err
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in saved] == [f"0 {TERM}\n"] * 2


@pytest.mark.parametrize("scheduler", first(1, [None, "SLURM_JOB_ID"]))
def test_a_save_that_takes_longer_than_we_wait(scheduler: str | None, script, tmp_path: Path) -> None:
    """It is killed, and that is said; under a scheduler the time is the scheduler's."""
    env = {scheduler: "1"} if scheduler else {"INVOCATION_ID": ""}
    flags = () if scheduler else ("--shutdown-timeout", "1")
    run = Run(tmp_path, script(TRAINS), "flag", "SIGTERM", "11" if scheduler else "4", flags=flags, env=env)
    os.kill(run.agent, signal.SIGTERM)
    code, saved, err = run.end()
    assert code == 143
    assert saved == ([0, 1] if scheduler else []), err
    if not scheduler:
        told = r"ranks 0, 1 had not ended \d s after SIGTERM and were killed; what was being saved may be incomplete"
        assert re.search(told, err), err


def test_signals_to_helpers_alone_and_a_notice_that_nobody_wants(script, tmp_path: Path) -> None:
    """The run continues; a second Ctrl-C ends it at once."""
    run = Run(tmp_path, script(SCRIPT), "fork", "30")
    signal_all(run.helpers)
    signal_all(run.helpers, signal.SIGUSR1)
    os.kill(run.agent, signal.SIGUSR2)
    time.sleep(0.5)
    assert all(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in run.every)
    os.kill(run.agent, signal.SIGTERM)
    time.sleep(0.3)  # Python handles signals that wait together in the order of their numbers
    os.kill(run.agent, signal.SIGINT)
    code, saved, err = run.end()
    assert (code, saved) == (143, [])
    assert "SIGUSR2: the script neither handles it nor asks px.stop, so the ranks continue" in err


def test_track_ends_and_the_checkpointer_saves(phalanx: Runner, script, tmp_path: Path) -> None:
    """Whatever its schedule says, and the next run resumes there."""
    name = script(
        """
        import torch, phalanx as px
        with px.init() as world:
            model = px.data_parallel(torch.nn.Linear(4, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            state = px.State(model=model, optimizer=optimizer)
            with px.Checkpointer("checkpoints", every=1_000_000) as checkpointer:
                checkpointer.load_latest(state)
                begun = state.step
                for batch in px.track([torch.randn(2, 4)] * 100_000, quiet=True):
                    model(batch).sum().backward()
                    optimizer.step()
                    state.step += 1
                    checkpointer.save(state)
                    if state.step == begun + 20 and world.rank == 1:
                        px.stop.request("twenty steps")
            px.print("from", begun, "to", state.step, px.stop.reason)
        """
    )
    begun, end, stop = 0, 0, {"step": 0}
    for _ in range(2):
        outcome = phalanx("run", "--nproc-per-node", "2", name)
        assert outcome.code == 0, outcome.err
        begun, end = (int(step) for step in re.findall(r"from (\d+) to (\d+) twenty steps", outcome.out)[0])
        stop = json.loads((tmp_path / "runs/latest/report.json").read_text())["stop"]
        assert (stop["by"], stop["step"]) == ("a request (twenty steps)", end - begun)
        assert end in stop["saved"].values()
        told = f"stopped by a request (twenty steps) after {end - begun} steps; all ranks have ended by themselves"
        assert f"{told}; the last checkpoint is of step {end}\n" in outcome.err
    assert begun == end - stop["step"] > 20


def test_a_time_limit_ends_a_script_that_asks_nothing(phalanx: Runner, script) -> None:
    name = script("import time\ntime.sleep(60)")
    flags = ("--time-limit", "1s", "--stopped-exit-code", "75")
    outcome = phalanx("run", "--nproc-per-node", "2", *WITHOUT_TORCH, *flags, name)
    assert outcome.code == 75
    assert "phalanx: the time limit is 0 s away: stopping the ranks, 10 s at most (Ctrl-C: at once)" in outcome.told


WITHOUT_LIBRARY = """
import ctypes
class CDLL(ctypes.CDLL):
    def __init__(self, name, *args, **options):
        if "libphalanx_shm" in str(name):
            raise OSError("no such file")
        super().__init__(name, *args, **options)
ctypes.CDLL = CDLL
"""


def test_without_the_c_library_it_is_said_once_that_loaders_are_not_guarded(
    phalanx: Runner, script, tmp_path: Path
) -> None:
    script(WITHOUT_LIBRARY, name="sitecustomize.py")
    name = script(
        """
        from torch.utils.data import DataLoader
        for _ in range(2):
            assert len(list(DataLoader([1, 2], num_workers=1))) == 2
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "2", name, env={"PYTHONPATH": str(tmp_path)})
    assert outcome.code == 0, outcome.err
    told = "a scheduler's signal ends the workers of a DataLoader: the shm library is not there: no such file"
    assert outcome.err.count(told) == 1


HELPERS = """
import multiprocessing, os, subprocess, time
from concurrent.futures import ProcessPoolExecutor
import torch
from torch.utils.data import DataLoader

def pid(_=0):
    return os.getpid()

def main():
    rank, found = int(os.environ["RANK"]), {}
    fork = multiprocessing.get_context("fork")
    options = dict(num_workers=1, persistent_workers=True, pin_memory=True, multiprocessing_context=fork)
    loader = iter(DataLoader(range(1_000_000), **options))
    found["loader"] = loader._workers[0].pid
    found["pool"] = (pool := fork.Pool(1)).apply(pid)
    found["executor"] = (executor := ProcessPoolExecutor(1, mp_context=fork)).submit(pid).result()
    (process := fork.Process(target=time.sleep, args=(600,), daemon=True)).start()
    found["process"] = process.pid
    found["program"] = (program := subprocess.Popen(["sleep", "600"])).pid
    next(loader)
    with open(f"helpers-{rank}", "w") as file:
        file.write("\\n".join(f"{pid} {name}" for name, pid in found.items()))
    open(f"ready-{rank}", "w").write(str(os.getpid()))
    while not os.path.exists("signalled"):
        time.sleep(0.01)
    for _ in range(20):  # they serve as before
        next(loader)
    assert pool.apply(pid) == found["pool"] and executor.submit(pid).result() == found["executor"]
    open(f"served-{rank}", "w").close()
    time.sleep(600)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("whom", first(1, ["rank", "agent"]))
def test_helpers_outlive_a_schedulers_signal_and_die_with_their_rank(whom: str, script, tmp_path: Path) -> None:
    """Whatever a rank forks through multiprocessing. A program that it executes ends by the signal, as always."""
    run = Run(tmp_path, script(HELPERS))
    texts = [(tmp_path / f"helpers-{rank}").read_text().splitlines() for rank in range(2)]
    helpers = [(int(pid), name) for text in texts for pid, _, name in (line.partition(" ") for line in text)]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        signal_all([pid for pid, _ in helpers if psutil.pid_exists(pid)], number)
    time.sleep(0.3)
    living = {name for pid, name in helpers if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"}
    assert living == {"loader", "pool", "executor", "process"}
    (tmp_path / "signalled").touch()
    limit = time.monotonic() + 30
    while not all((tmp_path / f"served-{rank}").exists() for rank in range(2)):
        assert run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)
    os.kill(run.agent if whom == "agent" else run.ranks[1], signal.SIGKILL)
    code, _, err = run.end()
    assert code == (-signal.SIGKILL if whom == "agent" else 137), err
    # that nothing is left is what every test checks
