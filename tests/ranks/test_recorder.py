"""What each rank writes about itself under `phalanx run`, on shm and on gloo, without a change of the script."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from phalanx import messages
from phalanx.status import layout, reading
from tests.conftest import Runner

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.utils.data import DataLoader
from phalanx import messages
from phalanx.status import layout, own_page, reading

def fields(record):
    return json.loads(messages.encode(record))

def directory():
    return Path(os.environ["PHALANX_RUN_DIR"])

def train(model, rank):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(torch.ones(20, 10), batch_size=4):
        optimizer.zero_grad()
        model(x).sum().backward()  # BACKWARD
        optimizer.step()

def look(path):
    # From another process, as anybody would.
    code = ("import sys, json; from pathlib import Path; from phalanx import messages;"
            "from phalanx.status import reading; p = Path(sys.argv[1]);"
            "ok = reading.ask(p, 5.0); print(messages.encode([ok, reading.read(p)]).decode())")
    import subprocess
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        os.kill(os.getpid(), layout.STACK_SIGNAL)
        return i

if __name__ == "__main__":
    started = reading.read(layout.status_path(directory(), int(os.environ["RANK"]))).phase
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(7, dtype=torch.float64), group=pair)
    train(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10)), rank)
    own = layout.status_path(directory(), rank)
    assert reading.ask(own, 5.0)  # of gloo's groups it knows by looking at them
    after = fields(reading.read(own))
    if rank == 1:
        if os.fork() == 0:  # nothing of the rank's page is the child's
            torch.optim.SGD([torch.ones(3, requires_grad=True)]).step()
            os._exit(0 if own_page.current() is None else 1)
        assert os.wait()[1] == 0
        torch.save(torch.ones(3), directory() / "x.pt")
        list(DataLoader(Slow(), num_workers=1))
        found = None
        while not found:  # until rank 0 waits
            answered, other = look(layout.status_path(directory(), 0))
            found = [c for c in other["collectives"] if c["state"] == "running"]
        os.kill(os.getpid(), layout.STACK_SIGNAL)
        (directory() / "seen.json").write_text(json.dumps(
            {"started": started, "after": after, "waiting": other, "answered": answered,
             "saved": fields(reading.read(own))}))
        dist.send(torch.ones(5), 0)  # SEND
        dist.recv(torch.ones(5), src=0)
        if sys.argv[1] == "raise":
            raise ValueError("no")
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        dist.recv(torch.ones(5), src=1)  # RECV
        dist.send(torch.ones(5), dst=1)
        dist.barrier()
"""


def as_status(fields: object) -> reading.Status:
    return messages.fit(fields, reading.Status, "here")


def line_of(mark: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if f"# {mark}" in line)


@pytest.mark.parametrize(("backend", "end"), [("auto", "kill"), ("as-written", "raise")], ids=["shm", "gloo"])
def test_what_a_rank_writes(backend: str, end: str, phalanx: Runner, script: Any, tmp_path: Path) -> None:
    name = script(SCRIPT)
    outcome = phalanx("run", "--nproc-per-node", "2", "--backend", backend, name, end)
    (directory,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.is_symlink())
    assert (directory / "seen.json").exists(), outcome
    seen = json.loads((directory / "seen.json").read_text())
    assert seen["started"] == "started"

    after = as_status(seen["after"])
    assert (after.phase, after.updates) == ("other", 5)
    assert all(after.seconds[phase] > 0 for phase in ("joining", "data", "forward", "backward", "optimizer"))
    assert {group.name: group.ranks for group in after.groups}["0"] == (0, 1)
    assert len(after.groups) == 2
    assert as_status(seen["saved"]).seconds["checkpoint"] > 0

    # Rank 0 waits for a message, and its last collectives are DDP's, with the line of backward.
    other = as_status(seen["waiting"])
    assert seen["answered"]
    waits = other.open_collective
    assert waits is not None
    assert (waits.op, waits.peer, waits.size, str(waits.place)) == ("recv", 1, 5, f"train.py:{line_of('RECV')}")
    ddp = [one for one in other.collectives if one.op == "all_reduce" and one.group == "0"][-5:]
    assert [(one.size, one.dtype, one.state) for one in ddp] == [(110, "float32", "done")] * 5
    assert {str(one.place) for one in ddp} == {f"train.py:{line_of('BACKWARD')}"}
    first = ddp[1].number  # after the first step DDP broadcasts how it has sorted its buckets
    assert [one.number for one in ddp[1:]] == list(range(first, first + 4))
    pair = next(one for one in other.collectives if one.dtype == "float64")
    assert (pair.op, pair.size, pair.number, pair.group != "0") == ("all_reduce", 7, 1, True)

    # After its end a rank's page says what it did last.
    last = reading.read(layout.status_path(directory, 1))
    assert last is not None
    assert [one.size for one in last.collectives if one.op == "all_reduce" and one.group == "0"][-5:] == [110] * 5
    # Stacks: of a loader's worker, and of the rank itself.
    stacks = layout.stacks_path(directory, 1).read_text()
    assert re.search(r'train.py", line \d+ in __getitem__', stacks)
    assert re.search(r'train.py", line \d+ in <module>', stacks)
    if backend == "as-written":
        group = next(group for group in other.groups if group.name == "0")
        assert group.enqueued == group.completed == ddp[-1].number
