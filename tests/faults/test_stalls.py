"""Runs that stand still for real, on shm and on gloo: each gets its verdict, and those that only take long get none.

The cases are attempts of one run: what the launcher ends for a hang it starts again, and the script goes on to its next
case. So torch is imported once for all of them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx import events
from phalanx.diagnose.run_directory import read_events
from phalanx.testing import virtual_nodes
from tests.conftest import start, told

CASES = """
import atexit, ctypes, fcntl, os, queue, signal, sqlite3, subprocess, sys, threading, time
import torch, torch.distributed as dist, phalanx as px
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

case = sys.argv[1:][int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
is_odd = os.environ["RANK"] == "1"
if case == "joining" and is_odd:
    time.sleep(1000)
dist.init_process_group("gloo")
total = torch.ones(1000)

class Images(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if is_odd and index == 13:
            time.sleep(1000)
        return torch.ones(3)

def step():
    dist.all_reduce(total)

def train(workers):
    model = DDP(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Images(), batch_size=4, num_workers=workers):
        model(x).sum().backward()
        optimizer.step()

def leave():
    for index in range(5):
        if is_odd and index == 3:
            break
        step()
    time.sleep(1000)

def hold(lock):
    with lock:
        time.sleep(1000)

def wait_for_lock():
    lock = threading.Lock()
    threading.Thread(target=hold, args=[lock], daemon=True).start()
    while not lock.locked():
        pass
    with lock:
        step()

def upload():
    threading.Event().wait()

def produce():
    raise OSError("shard 12 is corrupt")

def compute():
    x = 0
    while True:
        x += 1

step()
if os.environ.get("SLOW_LINK") and case == "lock":
    dist.broadcast(torch.ones(500_000), 0)
if case == "sizes":
    dist.broadcast(torch.ones(100 if is_odd else 10), 0)
if case == "data":
    train(0)
if case == "loader":
    train(2)
if case == "left":
    leave()
if case == "nobody":
    time.sleep(1000)
if case == "first":
    with px.rank_zero_first():
        time.sleep(0 if is_odd else 1000)
if is_odd:
    if case == "lock":
        wait_for_lock()
    if case == "died":
        threading.Thread(target=produce, name="producer").start()
        queue.Queue().get()
    if case == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if case == "child":
        subprocess.run(["sleep", "1000"])
    if case == "finished":
        threading.Thread(target=time.sleep, args=[1000]).start()
        sys.exit()
    if case == "exit":
        atexit.register(upload)
        sys.exit()
    if case == "database":
        databases = [sqlite3.connect("log.db", timeout=1000, isolation_level=None) for _ in range(2)]
        databases[0].execute("begin exclusive")
        databases[1].execute("begin exclusive")
    if case == "file":
        holder = subprocess.Popen(["flock", "file.lock", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE)
        holder.stdout.readline()
        fcntl.flock(open("file.lock"), fcntl.LOCK_EX)
    if case == "native":
        enter, state = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        enter(state)
        enter(state)
    if case == "branch":
        dist.barrier()
    if case == "recv":
        dist.recv(total, 0)
    if case == "computes":
        torch.optim.SGD([torch.ones(1)], lr=0.1).step()  # before the first step it would be given more time
        compute()
    if case == "sizes":
        time.sleep(1000)
step()
"""

WAITS = r"rank 0 waits in all_reduce #2 \(1,000 float32\), train.py:\d+ in step: dist.all_reduce\(total\)"
SLEEPS = r"time.sleep\(1000\)"
VERDICTS = {
    "joining": [
        r"rank 0 waits in init_process_group, train.py:\d+: dist.init_process_group\(\"gloo\"\)",
        rf"rank 1 is missing: it sleeps at train.py:\d+: {SLEEPS}",
    ],
    "data": [
        r"rank 0 waits in all_reduce #\d+ \(8 float32\), train.py:\d+ in train: model\(x\).sum\(\).backward\(\)",
        rf"rank 1 is missing: it sleeps in __getitem__ at train.py:\d+: {SLEEPS}",
        r"rank 1 \(pid \d+\): last progress \d.\d s ago, in phase data, 3 optimizer steps, CPU \d+ %",
    ],
    "loader": [
        r"rank 0 waits in all_reduce #\d+ \(8 float32\), train.py:\d+ in train: model\(x\).sum\(\).backward\(\)",
        r"rank 1 is missing: it waits for its data loader in train at train.py:\d+: for x in DataLoader\(Images.*",
        rf"its worker \(pid \d+\) is at train.py:\d+ in __getitem__: {SLEEPS}",
        r"rank 1 \(pid \d+\): .* in phase data, 3 optimizer steps, CPU \d+ %",
    ],
    "left": [
        r"rank 0 waits in all_reduce #5 .* in step: dist.all_reduce\(total\)",
        rf"rank 1 is missing: it has left the loop of train.py:\d+ and sleeps in leave at train.py:\d+: {SLEEPS}",
    ],
    "nobody": [rf"ranks 0, 1: each sleeps at train.py:\d+: {SLEEPS}"],
    "first": [
        r"rank 1 waits in rank_zero_first, train.py:\d+: with px.rank_zero_first\(\):",
        r"rank 0 is missing: it sleeps at train.py:\d+: time.sleep\(0 if is_odd else 1000\)",
    ],
    "lock": [
        WAITS,
        r"rank 1 is missing: it waits for a lock or another thread in wait_for_lock at train.py:\d+: with lock:",
        rf"another thread of rank 1 may hold it: train.py:\d+ in hold: {SLEEPS}",
    ],
    "died": [
        WAITS,
        r"rank 1 is missing: it waits for a lock or another thread at train.py:\d+: queue.Queue\(\).get\(\)",
        r"its thread producer has died: OSError: shard 12 is corrupt at train.py:\d+",
    ],
    "stopped": [WAITS, r"rank 1 is missing: it is stopped by a signal \(SIGSTOP; kill -CONT \d+ resumes it\).*"],
    "child": [
        WAITS,
        r"rank 1 is missing: it waits for a process that it has started at train.py:\d+: subprocess.run.*",
        r"its process \(pid \d+\): sleep 1000",
    ],
    "finished": [
        WAITS,
        "rank 1 is missing: it has finished its script",
        r"its process \(pid \d+\) has not ended: one of its threads may keep it",
    ],
    "exit": [
        WAITS,
        "rank 1 is missing: it has finished its script",
        r"its process \(pid \d+\) has not ended: its main thread is in an atexit handler at train.py:\d+: threading.*",
    ],
    "database": [
        WAITS,
        r"rank 1 is missing: it waits for a lock on an SQLite database at train.py:\d+: databases\[1\].*",
    ],
    "file": [
        WAITS,
        r"rank 1 is missing: it waits for a lock on a file at train.py:\d+: fcntl.flock.*",
        r"pid \d+ \((flock file.lock .*|sleep 1000)\) holds it",
    ],
    "native": [
        WAITS,
        r"rank 1 is missing: it waits for a lock or a thread inside native code at train.py:\d+: enter\(state\)",
    ],
    "recv": [WAITS, r"rank 1 waits in recv from rank 0.*, train.py:\d+: dist.recv\(total, 0\)"],
    "computes": [
        WAITS,
        r"rank 1 is missing: it computes at \d+ % CPU in compute at train.py:\d+: (while True:|x \+= 1)",
    ],
    # Of gloo alone: on shm these are errors, at once.
    "branch": [WAITS, r"rank 1 waits in barrier #2, train.py:\d+: dist.barrier\(\)"],
    "sizes": [
        r"rank 0 called broadcast #2 \(10 float32\), train.py:\d+: dist.broadcast.*, and continued",
        r"rank 1 called broadcast #2 \(100 float32\), train.py:\d+: dist.broadcast.*, and continued",
        r"rank 0 waits in all_reduce #3 .*",
        rf"rank 1 is missing: it sleeps at train.py:\d+: {SLEEPS}",
    ],
}
TITLES = {
    "nobody": ", and nobody waits for another",
    "recv": ": each waits for another one that waits elsewhere",
    "branch": ": they have called different collectives",
    "sizes": ": they have called a collective with different sizes or types",
}
GLOO_ALONE = ["branch", "sizes"]
ONCE = ["exit", "database", "file", "native"]  # the backend has no part in these
ON_SHM = [case for case in VERDICTS if case not in GLOO_ALONE]
ON_GLOO = [case for case in VERDICTS if case not in ONCE]
SLOW = """
import io, sys, time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
dist.init_process_group("gloo")
rank = dist.get_rank()
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([parameter], lr=0.1)

class Slow(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        time.sleep(0.4)
        return index

class SlowDisk(io.FileIO):
    def write(self, data):
        if len(data) > 5000:
            time.sleep(0.25)
        return super().write(data)

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass

if rank == 1:
    compute(4.5)            # a long first step
dist.barrier()
optimizer.step()
for index in range(4):      # slow, but alive
    time.sleep(0.7 * rank)
    dist.all_reduce(torch.ones(3))
if rank == 0:               # a long evaluation on one rank
    for index in DataLoader(Slow()):
        pass
dist.barrier()
if rank == 0:               # a long checkpoint: longer than a rank that works may take otherwise
    with SlowDisk("state.pt", "wb") as file:
        torch.save([torch.ones(2000) + index for index in range(50)], file)
dist.barrier()
print("through", flush=True)
"""
UNSEEN = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for index in range(20):     # longer than --stall-after, and nothing but collectives
    dist.all_reduce(torch.ones(3))
    time.sleep(0.3)
print("through", flush=True)
if dist.get_rank() == 1:
    time.sleep(1000)
dist.all_reduce(torch.ones(3))
"""
COMPILES = """
import subprocess, torch, torch.distributed as dist
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(3))
torch.optim.SGD([parameter], lr=0.1).step()
dist.barrier()

def backend(graph, inputs):     # as inductor's: another process compiles, and this one waits for it
    if dist.get_rank() == 1:
        subprocess.run(["sh", "-c", "for i in $(seq 60); do head -c 100000 /dev/zero > object.o; sleep 0.1; done"])
    return graph.forward

torch.compile(lambda x: x * 2, backend=backend)(parameter)
dist.barrier()
print("through", flush=True)
"""
RESUMES = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2]) if sys.argv[2:] else 1800))
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(float(sys.argv[1]))
dist.all_reduce(torch.ones(3))
"""


class Run:
    """One command, started now and read later, so that several can wait at the same time."""

    def __init__(
        self, place: Path, name: str, text: str, *flags: str, arguments: Sequence[str] = (), **environ: str
    ) -> None:
        self.directory = place / name
        self.directory.mkdir()
        (self.directory / "train.py").write_text(text)
        command = ("-m", "phalanx", "run", "--nproc-per-node", "2", *flags, "train.py", *arguments)
        self._process = start(*command, cwd=self.directory, env=environ)

    def end(self) -> None:
        self.out, self.err = self._process.communicate(timeout=150)
        self.code = self._process.returncode

    @property
    def report(self) -> dict:
        return json.loads((self.directory / "runs/latest/report.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    place = tmp_path_factory.mktemp("stalls")
    gloo, kills = ("--backend", "as-written"), ("--stall-after", "1", "--on-stall", "kill", "--max-restarts")
    kill_after_two = ("--stall-after", "2", "--on-stall", "kill")
    found = {
        "shm": Run(place, "shm", CASES, *kills, str(len(ON_SHM) - 1), arguments=ON_SHM),
        "gloo": Run(place, "gloo", CASES, *gloo, *kills, str(len(ON_GLOO) - 1), arguments=ON_GLOO),
        "slow on shm": Run(place, "slow on shm", SLOW, *kill_after_two),
        "slow on gloo": Run(place, "slow on gloo", SLOW, *gloo, *kill_after_two),
        "compiles": Run(place, "compiles", COMPILES, "--stall-after", "1", "--on-stall", "kill"),
        "resumes": Run(place, "resumes", RESUMES, "--stall-after", "1.5", arguments=["4"]),
        "gives up on shm": Run(place, "gives up on shm", RESUMES, "--stall-after", "1", arguments=["60", "6"]),
        "gives up on gloo": Run(place, "gives up on gloo", RESUMES, *gloo, "--stall-after", "1", arguments=["60", "6"]),
        "off": Run(place, "off", RESUMES, "--stall-after", "0", "--on-stall", "kill", arguments=["4"]),
        "unseen": Run(place, "unseen", UNSEEN, *gloo, *kill_after_two, TORCH_FR_BUFFER_SIZE="0"),
    }
    for run in found.values():
        run.end()
    return found


def blocks(run: Run) -> list[list[str]]:
    """Each verdict with its lines."""
    found: list[list[str]] = []
    for line in run.err.splitlines():
        if line.startswith("phalanx: no rank has made progress"):
            found.append([line])
        elif line.startswith("  ") and found:
            found[-1].append(line.strip())
    return found


@pytest.mark.parametrize(
    ("backend", "case"), [*(("shm", case) for case in ON_SHM), *(("gloo", case) for case in ON_GLOO)]
)
def test_each_hang_gets_its_verdict(runs: dict[str, Run], backend: str, case: str) -> None:
    run = runs[backend]
    verdicts = blocks(run)
    assert len(verdicts) == len(ON_SHM if backend == "shm" else ON_GLOO), run.err
    first, *lines, last = verdicts[(ON_SHM if backend == "shm" else ON_GLOO).index(case)]
    assert len(lines) + 2 <= 15
    assert re.fullmatch(rf"phalanx: no rank has made progress for \d+(\.\d)? s{TITLES.get(case, '')}", first), first
    for expected in VERDICTS[case]:
        assert any(re.fullmatch(expected, line) for line in lines), (expected, lines)
    assert re.fullmatch(r"all stacks: runs/[\d-]+/stall-\d+.txt; ending the run \(--on-stall kill\)", last), last
    stacks = (run.directory / last.partition(": ")[2].partition(";")[0]).read_text()
    assert "=== rank 0" in stacks
    assert "=== rank 1" in stacks
    assert stacks.count("main thread MainThread") >= 1
    assert f"{run.directory.name}" in stacks or "train.py:" in stacks


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_hang_that_is_ended_is_a_failure_with_a_cause(runs: dict[str, Run], backend: str) -> None:
    run = runs[backend]
    assert run.code == 1
    lines = told(run.err)
    restarts = [line for line in lines if "starting again" in line]
    assert len(restarts) == len(ON_SHM if backend == "shm" else ON_GLOO) - 1
    assert re.fullmatch(
        r"phalanx: a hang: rank 1 sleeps at train.py:\d+ while rank 0 waits in init_process_group; starting again.*",
        restarts[0],
    )
    assert lines[-1].startswith("phalanx: a hang: ")
    assert "SIGTERM" not in run.err
    assert run.err.count("Traceback") == 1, "Python's own, of the thread that dies"
    cause = run.report["hang"]
    assert lines[-1] == f"phalanx: {cause['headline']}"
    assert cause["ranks"] == [1]
    log = read_events(run.directory / "runs/latest" / events.AGENT_EVENTS)
    assert [each["event"] for each in log].count("stall") == len(blocks(run))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_only_takes_long_is_left_alone(runs: dict[str, Run], backend: str) -> None:
    run = runs[f"slow on {backend}"]
    assert (run.code, run.out.count("through")) == (0, 2), run.err
    assert "progress" not in run.err


def test_a_rank_that_compiles_is_no_hang(runs: dict[str, Run]) -> None:
    """It takes longer than a rank that works may take otherwise."""
    run = runs["compiles"]
    assert (run.code, run.out.count("through")) == (0, 2), run.err
    [line] = [line for line in run.err.splitlines() if "compiles" in line]
    assert re.fullmatch(r"phalanx: rank 1 compiles \(\d s\); the others have their cache", line)
    assert "no rank has made progress" not in run.err
    assert "the ranks made progress again after" in run.err


def test_ranks_that_go_on(runs: dict[str, Run]) -> None:
    run = runs["resumes"]
    assert run.code == 0
    (verdict,) = blocks(run)
    assert verdict[-1].endswith("; still waiting (--on-stall kill ends the run)")
    assert re.fullmatch(r"phalanx: the ranks made progress again after \d.\d s", told(run.err)[-1])
    assert runs["off"].code == 0
    assert "progress" not in runs["off"].err


def test_collectives_of_which_torch_tells_nothing(runs: dict[str, Run]) -> None:
    """They are progress when they end, and where a rank waits is known; only not in which one."""
    run = runs["unseen"]
    assert run.out.count("through") == 2, run.err
    assert run.code == 1
    (verdict,) = blocks(run)
    assert re.fullmatch(r"rank 0 waits in a collective, train.py:\d+: dist.all_reduce\(torch.ones\(3\)\)", verdict[1])
    assert re.fullmatch(rf"rank 1 is missing: it sleeps at train.py:\d+: {SLEEPS}", verdict[2])


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_that_gives_up_ends_what_is_known_to_hang(runs: dict[str, Run], backend: str) -> None:
    """Nobody waits for a rank that might say more of the cause; --shutdown-timeout is 10 s."""
    run = runs[f"gives up on {backend}"]
    assert run.code == 1
    last = told(run.err)[-1]
    assert last.startswith("phalanx: a hang: rank 1 sleeps at train.py:")
    assert re.search(r" while rank 0 waits in all_reduce #\d+; rank 0 has given up waiting$", last), last
    log = read_events(run.directory / "runs/latest" / events.AGENT_EVENTS)
    given_up, stopped = (next(each["time"] for each in log if each["event"] == name) for name in ("exited", "stopping"))
    assert stopped - given_up < 5.0


@pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")
def test_a_rank_of_another_node(tmp_path: Path) -> None:
    """All consoles show the same verdict, and all nodes start again together. Before, a slow link gets none."""
    flags = ["--stall-after", "1", "--on-stall", "kill", "--max-restarts", "1", "--nnodes", "2"]
    with virtual_nodes(2, "4mbit") as nodes:
        agents = []
        for rank, node in enumerate(nodes):
            place = tmp_path / f"at-{rank}"
            place.mkdir()
            (place / "train.py").write_text(CASES)
            meeting = ["--node-rank", str(rank), "--master-addr", nodes[0].address, "--master-port", "29500"]
            command = [sys.executable, "-m", "phalanx", "run", *flags, *meeting, "train.py", "lock", "left"]
            slow = {**os.environ, "SLOW_LINK": "1"}
            agents.append(node.start(command, env=slow, cwd=place, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL))
        errors = [agent.communicate(timeout=60)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [1, 1], errors
    verdicts = [re.findall(r"^phalanx: (?:no rank|a hang).*(?:\n  .*)*", err, re.MULTILINE) for err in errors]
    assert verdicts[0] == verdicts[1]
    assert len(verdicts[0]) == 4
    text = "\n".join(verdicts[0])
    for expected in (*VERDICTS["lock"], *VERDICTS["left"]):
        assert re.search(expected.replace("#2", "#3"), text), (expected, text)
    assert "rank 1 on node1 (pid " in text
    stacks = [Path(found) for found in re.findall(r"all stacks: node0:(.*?);", text)]
    assert all("=== rank 1 on node1" in path.read_text() for path in stacks)
    assert len(stacks) == 2
