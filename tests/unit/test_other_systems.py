"""Windows and macOS, imitated: a process in which what Linux has and they have not is hidden."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HIDE = """
import os, shutil, signal, socket, sys, sysconfig

sysconfig.get_config_vars()  # the standard library's own knowledge of this system
NOT_ON_MACOS = "memfd_create pidfd_open sched_getaffinity posix_fallocate pipe2 eventfd"
NOT_ON_WINDOWS = NOT_ON_MACOS + ''' fork forkpty register_at_fork pread pwrite preadv pwritev killpg getpgid setsid
    setpgid getuid geteuid getgid getegid getloadavg uname sysconf chown fchown fchmod mkfifo WNOHANG wait4 waitid
    openpty O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK set_blocking'''
NO_SIGNALS = '''SIGKILL SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGCONT SIGSTOP SIGPIPE SIGRTMIN SIGRTMAX
    SIGBUS SIGXCPU pthread_sigmask pthread_kill setitimer'''


def hide(module, names):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def open_no_directory(path, *args, plain=os.open, **kwargs):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return plain(path, *args, **kwargs)


def no_proc(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(("/proc", "/sys")):
        frame = sys._getframe(1)
        while frame is not None:  # psutil knows those systems, too
            if "psutil" in frame.f_code.co_filename:
                return
            frame = frame.f_back
        raise FileNotFoundError(2, "No such file or directory", args[0])


def pretend(system):
    if system == "darwin":
        hide(os, NOT_ON_MACOS)
        hide(signal, "SIGRTMIN SIGRTMAX")
    else:
        hide(os, NOT_ON_WINDOWS)
        hide(signal, NO_SIGNALS)
        hide(socket, "AF_UNIX")
        for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty"):
            sys.modules[name] = None
        os.open = open_no_directory
        shutil._use_fd_functions = False
    sys.addaudithook(no_proc)
    sys.platform = system
"""

WORLD_OF_ONE = """
import torch, torch.distributed as dist, torch.distributed.checkpoint, torch.nn.parallel, torch.utils.data
import cloudpickle, fsspec, numpy, psutil, rich.console, tempfile, uuid
torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what torch imports late, as Linux has it
pretend("win32")
del dist.HashStore

import phalanx as px
from torch.utils.data import DataLoader, TensorDataset

for name in px.__all__:
    getattr(px, name)


def train(path):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(32, 3), torch.randn(32, 1))
    sampler = px.ShardSampler(data)
    model = px.data_parallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = px.State(model=model, optimizer=optimizer, sampler=sampler)
    checkpoints = px.Checkpointer(path)
    assert checkpoints.load_latest(state) is None
    mean, count = px.Mean(), 0
    for x, y in px.track(DataLoader(data, batch_size=4, sampler=sampler)):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        px.log(loss=loss.item())
        mean.update(loss.item())
        count += len(x)
    assert count == 32 and px.compute_metrics(loss=mean)["loss"] > 0
    state.step = 8
    checkpoints.save(state)
    checkpoints.close()
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    found = px.Checkpointer(path).load_latest(state)
    assert found.step == 8 and all(torch.equal(trained[name], value) for name, value in model.state_dict().items())
    px.barrier()
    assert list(px.shard(range(4))) == [0, 1, 2, 3]


with tempfile.TemporaryDirectory() as path:
    with px.init(seed=1) as world:
        assert (world.size, world.backend) == (1, "gloo")
        train(path + "/joined")
    train(path + "/alone")
    px.data_parallel(torch.nn.Linear(3, 1), mode="dp")(torch.randn(8, 3))
for refused in (lambda: px.spawn(print, nprocs=2), lambda: px.init("shm")):
    try:
        refused()
    except px.PhalanxError as error:
        print(error)
"""


def _run(code: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = cwd / "imitated.py"
    script.write_text(HIDE + textwrap.dedent(code))
    return subprocess.run([sys.executable, script, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


def test_a_world_of_one_works_without_fork_fcntl_and_proc(tmp_path: Path) -> None:
    outcome = _run(WORLD_OF_ONE, tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    spawn, shm = outcome.stdout.splitlines()[-2:]
    assert spawn.startswith("phalanx.spawn needs Linux, and this is Windows: use WSL2")
    assert shm.startswith("backend 'shm' cannot be used: ")


@pytest.mark.parametrize(
    ("system", "name", "way"), [("win32", "Windows", "WSL2"), ("darwin", "macOS", "a Linux machine")]
)
def test_commands_that_start_processes_are_one_sentence(tmp_path: Path, system: str, name: str, way: str) -> None:
    code = f"""
        import contextlib, io
        pretend({system!r})
        import phalanx
        from phalanx import cli
        for command in ("run x.py", "run -H a,b x.py", "bench launch", "inspect", "--version"):
            with contextlib.suppress(SystemExit):
                cli.main(command.split())
    """
    outcome = _run(code, tmp_path)
    lines = outcome.stderr.splitlines()
    assert [line.partition(" needs ")[0] for line in lines] == [
        *["phalanx: phalanx run"] * 2,
        "phalanx: phalanx bench",
        "phalanx: phalanx inspect",
    ]
    assert all(f"needs Linux, and this is {name}: use {way}" in line for line in lines)
    assert outcome.stdout.startswith("phalanx 0")
