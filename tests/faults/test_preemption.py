"""A scheduler ends a run: whichever processes it signals, in whatever order, the ranks save."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import start

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

    def __init__(self, directory: Path, name: str, *arguments: str, flags: tuple[str, ...] = ()) -> None:
        self._directory = directory
        self.process = start("-m", "phalanx", "run", "--nproc-per-node", "2", *flags, name, *arguments, cwd=directory)
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


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_every_process_is_signalled_and_the_ranks_save(method: str, script, tmp_path: Path) -> None:
    run = Run(tmp_path, script(SCRIPT), method, "0.5")
    signal_all(list(reversed(run.every)))
    code, saved, err = run.end()
    assert (code, saved) == (143, [0, 1]), err


TRAINS = """
import os, random, signal, sys, time
import torch, torch.distributed as dist
from torch import nn

how = sys.argv[1]
dist.init_process_group(sys.argv[2])
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
flag = []
if how == "handler":
    signal.signal(signal.SIGTERM, lambda number, frame: flag.append(number))
    assert signal.getsignal(signal.SIGTERM).__name__ == "<lambda>"
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
    time.sleep(random.random() * 0.02)
dist.barrier()
open(f"saved-{rank}", "w").write(f"{step} {px.stop.reason if how != 'handler' else flag}")
"""


@pytest.mark.parametrize("how", ["handler", "px.stop"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_all_ranks_stop_at_the_same_step(how: str, backend: str, script, tmp_path: Path) -> None:
    flags = ("--backend", "as-written") if backend == "gloo" else ()
    run = Run(tmp_path, script(TRAINS), how, "gloo", flags=flags)
    signal_all(list(reversed(run.every)))
    code, saved, err = run.end()
    assert (code, saved) == (143, [0, 1]), err
    texts = [(tmp_path / f"saved-{rank}").read_text() for rank in saved]
    assert texts[0] == texts[1], err
    assert texts[0].endswith("[15]" if how == "handler" else "SIGTERM")
