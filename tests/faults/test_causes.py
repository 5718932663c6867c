"""Why a rank failed, for real: a control group with little memory, a full /dev/shm, a crash, missing gradients.

Runs that only wait for torch wait for it together.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import WITHOUT_TORCH, Outcome, Runner, free_port, start

LIMIT_MIB = 800


class Job:
    """A run of its own in a directory of its own, which may run beside others."""

    def __init__(self, directory: Path, script: str, *flags: str, within: tuple[str, ...] = (), args: str = "") -> None:
        directory.mkdir()
        self.directory = directory
        (directory / "train.py").write_text(textwrap.dedent(script))
        command = [sys.executable, "-m", "phalanx", "run", *flags, "train.py", *args.split()]
        self._process = subprocess.Popen(
            [*within, *command], cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )

    def end(self) -> Outcome:
        out, err = self._process.communicate(timeout=90)
        return Outcome(self._process.returncode, out.decode(), err.decode(), 0.0)

    @property
    def report(self) -> dict:
        return json.loads((self.directory / "runs/latest/report.json").read_text())


def shown(outcome: Outcome) -> str:
    assert len(outcome.complaint) <= 15
    return "\n".join(outcome.complaint)


# ---- memory


def _own_group() -> tuple[Path, str] | None:
    """The group of this process that limits memory, and the file with the limit: version 2, or version 1."""
    rows = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in rows:
        if controllers == "memory":
            return Path("/sys/fs/cgroup/memory", path.lstrip("/")), "memory.limit_in_bytes"
    directory = Path("/sys/fs/cgroup", rows[-1][2].lstrip("/"))
    return (directory, "memory.max") if (directory / "memory.max").exists() else None


@pytest.fixture
def little_memory() -> Iterator[tuple[str, ...]]:
    """The words before a command that put it into a group of its own, below ours."""
    own = _own_group()
    if own is None:
        pytest.skip("no control group of this process limits memory")
    parent, limit = own
    group = parent / f"phalanx-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_MIB << 20))
        for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):
            if (group / swap).exists():
                (group / swap).write_text(str(LIMIT_MIB << 20) if "limit" in swap else "0")
    except OSError as error:
        if group.exists():
            group.rmdir()
        pytest.skip(f"a control group with a limit cannot be made here: {error}")
    yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    deadline = time.monotonic() + 5
    while True:
        try:
            return group.rmdir()
        except OSError:  # a process that has ended is in it for a moment more
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


HUNGRY = """
import os, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
kept = []
if dist.get_rank() == 1:
    while True:
        kept.append(torch.ones(4 << 20))  # 16 MiB
        time.sleep(0.01)
dist.barrier()
"""
HUNGRY_LOADER = """
from torch.utils.data import DataLoader

class Hungry:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return len(bytes(1 << 30).replace(b"\\0", b"\\1"))

list(DataLoader(Hungry(), num_workers=1))
"""


@pytest.mark.parametrize("backend", ["auto", "as-written"])
def test_killed_by_the_kernel_for_memory(backend: str, little_memory: tuple[str, ...], tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "2", "--backend", backend)
    job = Job(tmp_path / "job", HUNGRY, *flags, within=little_memory)
    outcome = job.end()
    text = shown(outcome)
    assert outcome.code == 128 + signal.SIGKILL
    assert (
        f"rank 1 failed: SIGKILL, killed by the kernel for memory: the limit is {LIMIT_MIB} MiB, rank 1 used " in text
    )
    assert "the limit is that of the control group /" in text
    assert "rank 0 fell with it" in text
    killed = job.report["cause"]["out_of_memory"]
    assert killed["limit"] == LIMIT_MIB << 20
    assert "phalanx-test-" in killed["group"]
    assert LIMIT_MIB / 2 < killed["used"] / 2**20 <= LIMIT_MIB
    assert all(rank["memory"] > 1 << 20 for rank in job.report["ranks"])


UNLUCKY = """
import os, signal, subprocess, sys, time
scores = [int(open(f"/proc/{pid}/oom_score_adj").read()) for pid in ("self", os.getppid())]
print("scores", *scores, flush=True)
hungry = subprocess.run([sys.executable, "-c", "len(b'1' * (1 << 30))"])
assert hungry.returncode == -signal.SIGKILL
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(60)
"""


def test_memory_has_run_out_and_the_zygote_is_gone(little_memory: tuple[str, ...], tmp_path: Path) -> None:
    """The kernel may take more than one process. Ranks go first; if the zygote goes all the same, it is said why."""
    job = Job(tmp_path / "job", UNLUCKY, *WITHOUT_TORCH, within=little_memory)
    outcome = job.end()
    assert outcome.code == 1
    assert "was killed by SIGKILL; all workers are ended" in outcome.complaint[0]
    killed = f"  the kernel has killed 1 process of this run for memory: the limit is {LIMIT_MIB} MiB"
    assert outcome.complaint[1] == killed
    assert outcome.complaint[2].startswith("  the limit is that of the control group /")
    assert job.report["said"] == [line.removeprefix("phalanx: ") for line in outcome.complaint]
    rank, zygote = map(int, outcome.out.split()[1:])
    assert zygote == int(Path("/proc/self/oom_score_adj").read_text())
    assert zygote < rank <= zygote + 100


def test_a_loaders_worker_is_killed_for_memory(little_memory: tuple[str, ...], tmp_path: Path) -> None:
    outcome = Job(tmp_path / "job", HUNGRY_LOADER, within=little_memory).end()
    text = shown(outcome)
    assert outcome.code == 1
    assert "is killed by signal: Killed" in text
    assert f"was killed by the kernel for memory: the limit is {LIMIT_MIB} MiB, it used " in text


def test_killed_by_somebody_is_not_killed_for_memory(phalanx: Runner, script) -> None:
    outcome = phalanx("run", *WITHOUT_TORCH, script("import os; os.kill(os.getpid(), 9)"))
    assert outcome.complaint[0].startswith("phalanx: rank 0 failed: SIGKILL, killed from outside: by the kernel when ")


# ---- /dev/shm

SMALL_SHM = (
    *("unshare", "--mount", "sh", "-c"),
    'mount --make-rprivate / && mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"',
    "sh",
)
MAPPED = """
import mmap, os
fd = os.open("/dev/shm/table", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 100 << 20)
table = mmap.mmap(fd, 0)
for page in range(0, len(table), 4096):
    table[page] = 1
"""
LARGE_BATCHES = """
import torch
from torch.utils.data import DataLoader

class Large:
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(10 << 20)  # 40 MiB

list(DataLoader(Large(), num_workers=1))
"""
FULL = "what DataLoader workers send is kept there: enlarge it (docker run --shm-size 8g, or mount -o remount,size=8g"


def test_shared_memory_is_full(tmp_path: Path) -> None:
    mapped = Job(tmp_path / "mapped", MAPPED, "--nproc-per-node", "1", *WITHOUT_TORCH, within=SMALL_SHM)
    loader = Job(tmp_path / "loader", LARGE_BATCHES, within=SMALL_SHM)
    outcome, other = mapped.end(), loader.end()
    assert outcome.code == 128 + signal.SIGBUS
    assert outcome.complaint[0] == "phalanx: rank 0 failed: SIGBUS, /dev/shm is full (64 MiB of 64 MiB)"
    assert outcome.complaint[2].startswith(f"  {FULL}")
    assert "  at train.py:7: table[page] = 1" in outcome.complaint
    assert mapped.report["cause"]["shared_memory"]["total"] == 64 << 20
    assert other.code == 1
    assert "No space left on device (28) (in DataLoader worker" in other.complaint[0], other.err
    assert "/dev/shm is " in other.complaint[2]
    assert FULL in shown(other)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_loaders_worker_is_killed(number: int, phalanx: Runner, script) -> None:
    """However the rank hears of it: by torch's handler wherever it is, or by a pipe without another end."""
    name = script(
        f"""
        import os
        from torch.utils.data import DataLoader

        class Deadly:
            def __len__(self):
                return 64

            def __getitem__(self, index):
                if index == 3:
                    os.kill(os.getpid(), {int(number)})
                return index

        list(DataLoader(Deadly(), num_workers=1))
        """
    )
    outcome = phalanx("run", name)
    assert outcome.code == 1
    assert f"is killed by signal: {signal.strsignal(number)}" in outcome.complaint[0], outcome.err
    assert ("/dev/shm has room" in shown(outcome)) == (number == signal.SIGBUS)
    assert any("train.py:14: list(DataLoader(Deadly(), num_workers=1))" in line for line in outcome.complaint), (
        outcome.err
    )
    # torch raises wherever Python happens to be. In a destructor, Python shows it and goes on.
    ignored = r"Exception ignored in.*?RuntimeError: DataLoader worker \(pid \d+\) is killed by signal: [^\n]*\n"
    rest = re.sub(ignored, "", outcome.err, flags=re.DOTALL)
    assert "Traceback" not in rest, "nothing has come between the failure and its report"


# ---- a store that is gone


def test_the_stack_that_torchs_store_prints_is_in_the_log_only(phalanx: Runner, script, latest: Path) -> None:
    """As on the nodes that are left when the one with the store dies."""
    name = script(
        """
        import datetime, os, sys
        from torch.distributed import TCPStore
        rank, port = int(os.environ["RANK"]), int(sys.argv[1])
        store = TCPStore("127.0.0.1", port, 3, rank == 0, datetime.timedelta(seconds=30), wait_for_workers=False)
        if rank == 0:
            store.wait(["1", "2"])
            os._exit(0)
        store.set(str(rank), "here")
        store.get("never")
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "3", name, str(free_port()))
    assert "torch.distributed.DistNetworkError: " in outcome.complaint[0], outcome.err  # "reset", or "failed to recv"
    assert "frame #" in (latest / "rank-1.log").read_text()
    assert [line for line in outcome.told if "TCPStore.cpp" in line]
    assert not [
        line for line in outcome.told if "frame #" in line or "Exception raised from" in line or line == "[rank 1] "
    ]


# ---- a program that is installed


def test_the_package_of_an_installed_program_is_the_users(phalanx: Runner, script, tmp_path: Path) -> None:
    """Its own lines are shown, and never one of phalanx."""
    script("", "site-packages/package/__init__.py")
    script("from package import model; model.build()", "site-packages/package/train.py")
    script("def build():\n    import phalanx\n    phalanx.spawn(build, nprocs=-1)", "site-packages/package/model.py")
    script("def build():\n    import ctypes\n    ctypes.string_at(0)", "crash/site-packages/package/model.py")
    script("", "crash/site-packages/package/__init__.py")
    script("from package import model; model.build()", "crash/site-packages/package/train.py")
    for place, line in (("", "phalanx.spawn(build, nprocs=-1)"), ("crash/", "ctypes.string_at(0)")):
        environment = {"PYTHONPATH": str(tmp_path / place / "site-packages")}
        outcome = phalanx("run", *WITHOUT_TORCH, "-m", "package.train", env=environment)
        lines = [each for each in outcome.complaint if each.startswith("  at ")]
        assert f"  at {place}site-packages/package/train.py:1: from package import model; model.build()" in lines
        assert f"  at {place}site-packages/package/model.py:3 in build: {line}" in lines, outcome.err
        assert not any("phalanx/" in each.split(":")[0] for each in lines)


# ---- native code


@pytest.mark.parametrize("own_handler", [False, True], ids=["plain", "own faulthandler"])
def test_a_crash_inside_an_extension_names_the_line_of_the_call(own_handler: bool, phalanx: Runner, script) -> None:
    name = script(
        """
        import ctypes, os, pathlib, sys, time
        pathlib.Path(os.environ["RANK"]).touch()
        while len(list(pathlib.Path().glob("[01]"))) < 2: time.sleep(0.001)
        print("before it", file=sys.stderr)
        def call_extension():
            ctypes.string_at(0)

        call_extension()
        """
    )
    environment = {"PYTHONFAULTHANDLER": "1"} if own_handler else {}
    outcome = phalanx("run", "--nproc-per-node", "2", *WITHOUT_TORCH, name, env=environment)
    assert outcome.code == 128 + signal.SIGSEGV
    assert " failed: SIGSEGV, native code touched memory that is not its own" in outcome.complaint[0]
    assert "  at train.py:9: call_extension()" in outcome.complaint
    assert "  at train.py:7 in call_extension: ctypes.string_at(0)" in outcome.complaint
    printed = outcome.complaint.index("  the last it printed:")
    assert outcome.complaint[printed + 1] == "    before it", "and nothing of faulthandler's"
    assert outcome.complaint[printed + 2].endswith(" failed in the same way"), "both have crashed by themselves"


# ---- gradients

FORGETFUL = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.spare = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, x):
        return self.used(x)

dist.init_process_group("gloo")
if sys.argv[1] == "phalanx":
    import phalanx as px
    model = px.data_parallel(Net())
else:
    model = DistributedDataParallel(Net())
    model.module.used.weight.requires_grad_(sys.argv[1] == "plain")  # DDP waits for it all the same

def train():
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()

train()
"""
NAMES = "spare.0.weight, spare.0.bias, spare.1.weight, spare.1.bias, spare.2.weight, spare.2.bias, spare.3.weight"


def test_parameters_without_a_gradient_are_named(tmp_path: Path) -> None:
    """With torch's own DistributedDataParallel, in a script that knows nothing of phalanx."""
    jobs = {
        "shm": Job(tmp_path / "shm", FORGETFUL, "--nproc-per-node", "2", args="plain"),
        "gloo": Job(tmp_path / "gloo", FORGETFUL, "--nproc-per-node", "2", "--backend", "as-written", args="frozen"),
        "phalanx": Job(tmp_path / "phalanx", FORGETFUL, "--nproc-per-node", "2", args="phalanx"),
    }
    outcomes = {name: job.end() for name, job in jobs.items()}
    for name, outcome in outcomes.items():
        text = " ".join(shown(outcome).split())
        assert outcome.code == 1
        switch = "data_parallel find_unused" if name == "phalanx" else "DistributedDataParallel find_unused_parameters"
        names, more = (f"used.weight, {NAMES}", 5) if name == "gloo" else (f"{NAMES}, spare.3.bias", 4)
        assert text.count(names) == 1, outcome.err
        assert f"{names} and {more} more got no gradient in the last step" in text
        assert f"give {switch}=True, freeze them with requires_grad_(False), or use them in the loss." in text
        assert "train.py:25 in train: model(torch.ones(2, 4)).sum().backward()" in text
        error = jobs[name].report["cause"]["error"]
        assert error["message" if name == "phalanx" else "note"].startswith(("spare.0.weight, ", "used.weight, "))


# ---- ranks that disagree


def test_ranks_that_have_called_different_collectives_are_named_with_their_lines(phalanx: Runner, script) -> None:
    """On shm it is an error at once. Who of them is heard first is a matter of chance."""
    name = script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.ones(4)
        if dist.get_rank() == 1:
            dist.broadcast(x, 0)
        else:
            dist.all_reduce(x)
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "3", name)
    block = shown(outcome)
    assert outcome.code == 1
    assert "rank 1 called broadcast(float32[4])" in block
    if "rank 1 failed" in block:
        assert "  at train.py:6: dist.broadcast(x, 0)\n  ranks 0, 2 at train.py:8: dist.all_reduce(x)\n" in block
    else:
        assert "  at train.py:8: dist.all_reduce(x)\n  rank 1 at train.py:6: dist.broadcast(x, 0)\n" in block
        assert re.search(r"\n  rank [02] failed in the same way\n", block)
    assert "fell with it" not in block
    told = phalanx("report").out
    assert re.search(r"^rank [012]: called another collective, ", told, re.MULTILINE), told


def test_the_same_on_gloo_which_ends_the_rank_that_notices(phalanx: Runner, script) -> None:
    name = script(
        """
        import time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.ones(1000))
        time.sleep(60)
        """
    )
    block = shown(phalanx("run", "--nproc-per-node", "2", "--backend", "as-written", name))
    assert "rank 1 failed: SIGABRT, gloo has received 1000 bytes where 4 were expected: the ranks have called" in block
    assert "\n  at train.py:6: dist.all_reduce(torch.ones(1))\n" in block
    assert "\n  rank 0 at train.py:8: dist.all_reduce(torch.ones(1000))\n" in block


# ---- phalanx report


def test_the_report_of_a_run_that_failed(phalanx: Runner, script, tmp_path: Path) -> None:
    name = script(
        """
        import os, time
        attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
        print("a line of rank", rank)
        if rank == 0:
            open(f"printed-{attempt}", "w").close()
            time.sleep(60)
        while not os.path.exists(f"printed-{attempt}"):
            time.sleep(0.01)
        raise ValueError(f"in attempt {attempt}")
        """
    )
    failed = phalanx("run", "--nproc-per-node", "2", "--max-restarts", "1", *WITHOUT_TORCH, name)
    told = phalanx("report")
    assert told.code == 0, told.err
    lines = told.lines
    assert lines[0].endswith("run --nproc-per-node 2 --max-restarts 1 --start-method exec train.py")
    assert lines[1].endswith(f", in {tmp_path}")
    assert lines[2].startswith("  ended with exit code 1 after ")
    assert lines[2].endswith(", in attempt 2")
    assert lines[3] == "  attempt 1: rank 1 failed: ValueError: in attempt 0 at train.py:10"
    block = [line.removeprefix("phalanx: ") for line in failed.complaint]
    assert lines[5 : 5 + len(block)] == block
    assert lines[6 + len(block) :] == [
        lines[6 + len(block)],
        "    a line of rank 0",
        "    --- attempt 2 ---",
        "    a line of rank 0",
        lines[-2],
        f"logs: runs/{os.readlink(tmp_path / 'runs/latest')}",
    ]
    assert re.fullmatch(r"rank 1: the cause, exit code 1, \d+ MiB at most: ValueError: in attempt 1", lines[-2])
    assert lines[6 + len(block)].startswith("rank 0: a victim, SIGTERM from the launcher, ")
    as_json = json.loads(phalanx("report", "runs/latest", "--json").out)
    assert as_json == json.loads((tmp_path / "runs/latest/report.json").read_text())
    assert [restart["cause"]["error"]["message"] for restart in as_json["restarts"]] == ["in attempt 0"]
    (node,) = as_json["nodes"].values()
    assert node["ranks"] == [0, 1]


def test_the_report_of_a_run_that_goes_on_is_stopped_or_loses_its_launcher(
    phalanx: Runner, script, tmp_path: Path
) -> None:
    name = script("import time; print('up', flush=True); time.sleep(60)")
    first, second = (
        start(
            "-m", "phalanx", "run", "--log-dir", directory, "--nproc-per-node", "2", *WITHOUT_TORCH, name, cwd=tmp_path
        )
        for directory in ("killed", "stopped")
    )
    for agent in (first, second):
        assert agent.stdout is not None
        for _ in range(2):
            assert "up" in agent.stdout.readline()
    told = phalanx("report", "killed")
    assert told.lines[2].startswith("  is running, for ")
    assert " in phase started since " in told.lines[4]
    assert told.lines[4].startswith("rank 0: pid ")
    first.kill()
    second.send_signal(signal.SIGINT)
    for agent in (first, second):
        agent.communicate(timeout=20)
    told = phalanx("report", "killed")
    assert told.code == 0, told.err
    assert told.lines[2].startswith("  lost its launcher, which was killed and has left no report.json; its last event")
    assert " last seen in phase started since " in told.lines[4]
    assert told.lines[5] == "    up"
    fields = json.loads(phalanx("report", "killed", "--json").out)
    assert (fields["state"], [rank["status"]["phase"] for rank in fields["ranks"]]) == ("lost", ["started", "started"])
    told = phalanx("report", "stopped")
    assert told.lines[2].startswith("  ended with exit code 130, stopped by SIGINT, after ")
    assert re.match(r"rank 0: stopped, (SIGINT|exit code 1).*: KeyboardInterrupt$", told.lines[4]), told.lines
