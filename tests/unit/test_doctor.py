"""The doctor: facts of other machines and what is said about them, and this machine for real."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.diagnose.doctor import command, machine, network, software, torch_probe
from phalanx.diagnose.doctor.finding import Facts, Finding
from phalanx.diagnose.doctor.machine import Limits, Memory, Space
from phalanx.diagnose.doctor.network import Clock, Interface, Master, Network
from phalanx.diagnose.doctor.software import Python
from phalanx.diagnose.doctor.torch_build import SystemGpus
from phalanx.diagnose.doctor.torch_probe import Gpu, Torch
from phalanx.errors import UsageError
from phalanx.launch import command as launch_command
from phalanx.system.cgroups import Allowance, Cores, allowance
from tests.conftest import REPOSITORY, Runner, read_terminal

GIB = 1 << 30
FOR_GPUS = {"driver", "capability", "NCCL", "GPU links", "fabric", "persistence", "RDMA", "memlock"}
"""Checks that have no line on a machine that they do not concern."""
ALWAYS = [name for name in command.CHECKS if name not in FOR_GPUS]
BIN = "/home/ada/env/bin"

HEALTHY = Facts(
    platform="linux",
    kernel="Linux 6.1 x86_64",
    container=None,
    asked_ranks=None,
    python=Python((3, 11, 7), f"{BIN}/python", "/home/ada/env", "/usr", False, None, f"{BIN}/phalanx", "p", True),
    torch=Torch(
        version="2.13.0+cpu",
        file="/home/ada/env/lib/torch/__init__.py",
        seconds=1.4,
        numpy="2.1.0",
        backends=("gloo",),
        library="version 4, avx2",
    ),
    gpus=SystemGpus(None, 0, None),
    nvidia={"problem": "nvidia-smi is not on PATH"},
    cores=Cores(4, 4, None),
    omp_num_threads=None,
    memory=Memory(16 * GIB, 12 * GIB, None, 0, 0),
    shared_memory=Space("/dev/shm", 8 * GIB, 8 * GIB),
    limits=Limits(1024, 1 << 20, None, 0, False),
    network=Network(
        "node1",
        ("10.0.0.5",),
        None,
        (Interface("lo", ("127.0.0.1",), True), Interface("eth0", ("10.0.0.5", "fe80::1"), True)),
        None,
        {29400: None, 29500: None},
    ),
    clock=Clock(True, 0.012),
    runs=Space("/home/ada/runs", 100 * GIB, 50 * GIB),
    tools={"ssh": "/usr/bin/ssh", "srun": None},
)


def but(base: Facts = HEALTHY, /, **changes: dict[str, Any] | object) -> Facts:
    """The healthy machine with other fields: ``but(cores={"quota": 0.5})``."""
    records = {
        name: replace(getattr(base, name), **change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return replace(base, **records)


def ailments(facts: Facts) -> dict[str, Finding]:
    return {each.name: each for each in command.examine(facts) if each.verdict in ("warning", "error")}


def test_a_healthy_machine_has_nothing() -> None:
    findings = command.examine(HEALTHY)
    assert ailments(HEALTHY) == {}
    assert [each.name for each in findings] == ALWAYS
    assert len(ALWAYS) == 23
    told = {each.name: each.value for each in findings}
    assert told["threads"] == "4 ranks × 1 thread on 4 cores"
    assert told["backends"] == "shm, gloo; not nccl, mpi"
    assert told["interfaces"] == "lo 127.0.0.1, eth0 10.0.0.5"
    assert command.summary(findings) == "20 ok, 0 warnings, 0 errors"
    assert command.exit_code(findings) == 0


DOCKER = replace(HEALTHY, container="docker")
BROKEN = {"version": None, "backends": (), "library": None}
CUDA = {"cuda": "12.4", "cuda_problem": "RuntimeError: driver too old"}
OTHER = {"command": "/usr/bin/phalanx", "command_python": "/usr/bin/python3", "command_is_ours": False}

MACHINES: dict[str, tuple[Facts, dict[str, tuple[str, str, str]]]] = {
    # a machine: what is found, as name: verdict, part of the value, part of the advice
    "a Mac": (but(platform="darwin"), {"system": ("error", "", "WSL2")}),
    "old Python": (but(python={"version": (3, 9, 2)}), {"python": ("error", "3.9.2", "python3.11 -m venv")}),
    "another environment is active": (
        but(python={"active": "/opt/conda/envs/b"}),
        {"environment": ("warning", "active one is /opt/conda/envs/b", "/opt/conda/envs/b/bin/python -m phalanx")},
    ),
    "a venv on conda's Python": (but(python={"base_prefix": "/opt/conda", "active": "/opt/conda"}), {}),
    "phalanx of another Python": (
        but(python=OTHER),
        {"command": ("warning", "/usr/bin/python3", "source /home/ada/env/bin/activate")},
    ),
    "the same in conda": (
        but(python={**OTHER, "is_conda": True}),
        {"command": ("warning", "", "conda activate /home/ada/env")},
    ),
    "no torch": (
        but(torch={**BROKEN, "is_missing": True, "problem": "ModuleNotFoundError: No module named 'torch'"}),
        {"torch": ("error", "not installed", f"{BIN}/python -m pip install --upgrade 'torch>=2.6'")},
    ),
    "old torch": (
        but(torch={"version": "1.13.1", "problem": "AttributeError: is_gloo_available"}),
        {"torch": ("error", "1.13.1, older than 2.6", "--upgrade 'torch>=2.6'")},
    ),
    "torch without shm": (
        but(torch={"version": "2.7.1+cpu", "library": None, "library_problem": "shm needs torch 2.8 or newer"}),
        {"C library": ("warning", "shm needs torch 2.8", "gloo, which is slower: /home/ada/env/bin/python -m pip")},
    ),
    "torch that lacks a library": (
        but(torch={**BROKEN, "problem": "OSError: libcudart.so.12"}),
        {"torch": ("error", "libcudart.so.12", "--force-reinstall torch")},
    ),
    "torch from elsewhere": (
        but(torch={**BROKEN, "problem": "ImportError: no", "file": "/data/torch/__init__.py"}),
        {"torch": ("error", "from /data/torch/__init__.py", "unset PYTHONPATH")},
    ),
    "a slow disk": (but(torch={"seconds": 95.0}), {"torch": ("warning", "95.0 s", "local disk")}),
    "old numpy": (but(torch={"numpy": "1.24.4"}), {"numpy": ("error", "1.24.4", "'numpy>=1.26'")}),
    "numpy of another age": (
        but(torch={"numpy_problem": "RuntimeError: Numpy is not available"}),
        {"numpy": ("error", "does not fit", "--upgrade torch numpy")},
    ),
    "no numpy": (
        but(torch={"numpy": None, "numpy_problem": "ModuleNotFoundError: No module named 'numpy'"}),
        {"numpy": ("error", "No module", "pip install")},
    ),
    "torch without distributed": (but(torch={"backends": ()}), {"backends": ("error", "shm; not gloo", "reinstall")}),
    "no compiler": (
        but(torch={"library": None, "library_problem": "the shm library is not there: no cc"}),
        {"C library": ("warning", "no cc", "apt-get install gcc")},
    ),
    "a driver without GPUs": (
        but(gpus={"driver": "550.54"}),
        {"devices": ("warning", "no GPU, though there is a driver (550.54)", "--gpus all")},
    ),
    "GPUs and a torch for CPUs": (
        but(gpus={"driver": "550.54", "nodes": 2}),
        {"devices": ("warning", "2 GPUs, driver 550.54, but this torch is for CPUs", "CUDA")},
    ),
    "GPUs that torch cannot use": (
        but(gpus={"driver": "470.1", "nodes": 1}, torch=CUDA),
        {"devices": ("error", "driver too old", "nvidia-smi")},
    ),
    "hidden GPUs": (but(gpus={"driver": "550.54", "nodes": 1, "visible": ""}, torch=CUDA), {}),
    "GPUs without nccl": (
        but(torch={"cuda": "12.4", "gpus": (Gpu("A100", 80 * GIB),) * 2}),
        {"backends": ("warning", "not nccl", "nccl")},
    ),
    "half a core": (
        but(DOCKER, cores={"quota": 0.5}),
        {"cores": ("warning", "1 usable of 4; the container's quota is 0.5", "docker run --cpus 2")},
    ),
    "a quota that suffices": (but(DOCKER, cores={"quota": 2.5}), {}),
    "OMP_NUM_THREADS=32": (
        but(omp_num_threads="32"),
        {"threads": ("warning", "4 ranks × 32 threads on 4 cores, by OMP_NUM_THREADS=32", "unset OMP_NUM_THREADS")},
    ),
    "OMP_NUM_THREADS=many": (
        but(omp_num_threads="many"),
        {"threads": ("warning", "'many' is not a number", "unset OMP_NUM_THREADS")},
    ),
    "OMP_NUM_THREADS=1,2": (but(omp_num_threads="1,2"), {}),
    "more ranks than cores": (but(asked_ranks=8), {"threads": ("warning", "8 ranks", "--nproc-per-node 4")}),
    "more ranks than cores, and OMP_NUM_THREADS=2": (
        but(asked_ranks=8, omp_num_threads="2"),
        {"threads": ("warning", "8 ranks × 2", "--nproc-per-node 4, and unset OMP_NUM_THREADS")},
    ),
    "little memory": (
        but(memory={"available": GIB}),
        {"memory": ("warning", "1.0 GiB free of 16.0 GiB, no swap", "--nproc-per-node 2")},
    ),
    "hardly any memory": (but(memory={"available": GIB // 4}), {"memory": ("error", "256 MiB free", "ps aux")}),
    "a container with little memory": (
        but(DOCKER, memory={"limit": 2 * GIB, "used_of_limit": GIB, "swap": GIB}),
        {"memory": ("warning", "1.0 GiB free of 2.0 GiB, the container's limit (the machine has", "--memory 16g")},
    ),
    "docker's /dev/shm": (
        but(DOCKER, shared_memory=Space("/dev/shm", 64 << 20, 64 << 20)),
        {"/dev/shm": ("warning", "64 MiB free of 64 MiB", "docker run --shm-size 8g")},
    ),
    "docker's /dev/shm, half full": (
        but(DOCKER, shared_memory=Space("/dev/shm", 64 << 20, 32 << 20)),
        {"/dev/shm": ("error", "32 MiB free of 64 MiB", "docker run --shm-size 8g")},
    ),
    "a pod's /dev/shm": (
        but(container="kubernetes", shared_memory=Space("/dev/shm", 64 << 20, 64 << 20)),
        {"/dev/shm": ("warning", "", "medium: Memory")},
    ),
    "a pod behind a shell": (
        but(container="kubernetes", init="/bin/sh -c phalanx run train.py"),
        {"pid 1": ("warning", "/bin/sh -c phalanx run train.py", "does not pass on SIGTERM")},
    ),
    "a shell in a container": (but(DOCKER, init="bash -l"), {}),
    "a pod": (
        but(
            container="kubernetes",
            init="/usr/bin/python /usr/bin/phalanx run train.py",
            network={"master": Master("PET_MASTER_ADDR", "job-0.job", ("10.0.0.5",), None, is_here=True)},
        ),
        {},
    ),
    "a pod without a Service": (
        but(
            container="kubernetes",
            network={
                "resolved": (),
                "resolve_problem": "Name or service not known",
                "master": Master("PET_MASTER_ADDR", "job-0.job", (), "Name or service not known", is_here=False),
            },
        ),
        {
            "host name": ("warning", "node1, not resolved", "subdomain, and a headless Service"),
            "master": ("warning", "PET_MASTER_ADDR=job-0.job is not resolved (Name or", "publishNotReadyAddresses"),
        },
    ),
    "the first pod behind a Service that is not headless": (
        but(
            container="kubernetes",
            network={"master": Master("MASTER_ADDR", "job-0.job", ("10.96.0.9",), None, is_here=True)},
        ),
        {"master": ("warning", "is 10.96.0.9, none of this machine's, which is node 0", "it takes a headless Service")},
    ),
    "a full /dev/shm": (but(shared_memory={"free": 1 << 20}), {"/dev/shm": ("error", "1 MiB free", "ls -l /dev/shm")}),
    "no /dev/shm": (but(shared_memory=None), {"/dev/shm": ("error", "not there", "mount -t tmpfs")}),
    "/dev/shm of root alone": (but(shared_memory={"is_writable": False}), {"/dev/shm": ("error", "", "chmod 1777")}),
    "ulimit -n 256": (
        but(limits={"files_soft": 256, "files_hard": 256}),
        {"open files": ("warning", "256 at most (hard limit 256), 4 ranks need 112", "limits.conf")},
    ),
    "ulimit -Sn 256": (but(limits={"files_soft": 256}), {"open files": ("warning", "256", "ulimit -n 65536")}),
    "ulimit -n 100": (
        but(DOCKER, limits={"files_soft": 100, "files_hard": 100}),
        {"open files": ("error", "need 112", "--ulimit nofile=65536")},
    ),
    "few processes": (
        but(limits={"processes": 200, "processes_used": 100}),
        {"processes": ("warning", "100 of 200 used, this user's limit", "ulimit -u")},
    ),
    "no more processes": (
        but(DOCKER, limits={"processes": 100, "processes_used": 90, "processes_by_container": True}),
        {"processes": ("error", "the container's limit", "--pids-limit")},
    ),
    "a loopback-only host name": (
        but(network={"resolved": ("127.0.1.1",)}),
        {"host name": ("warning", "node1 is 127.0.1.1", "`10.0.0.5 node1` into /etc/hosts")},
    ),
    "a name of somebody else": (
        but(network={"resolved": ("10.9.9.9",)}),
        {"host name": ("warning", "none of this machine's", "--master-addr")},
    ),
    "a name nobody knows": (
        but(network={"resolved": (), "resolve_problem": "Name or service not known"}),
        {"host name": ("warning", "not resolved (Name or service not known)", "10.0.0.5")},
    ),
    "loopback is down": (
        but(network={"interfaces": (Interface("lo", ("127.0.0.1",), False), Interface("e", ("10.0.0.5",), True))}),
        {"interfaces": ("error", "loopback is down", "ip link set lo up")},
    ),
    "GLOO_SOCKET_IFNAME of another machine": (
        but(network={"gloo_interface": "ib0"}),
        {"interfaces": ("error", "GLOO_SOCKET_IFNAME=ib0", "unset GLOO_SOCKET_IFNAME")},
    ),
    "a busy port": (
        but(network={"ports": {29400: None, 29500: "pid 7 (serve)"}}),
        {"ports": ("warning", "29400 free, 29500 taken by pid 7 (serve)", "--master-port")},
    ),
    "a clock of its own": (
        but(clock=Clock(False, 16.0)),
        {"clock": ("warning", "not synchronised", "timedatectl set-ntp true")},
    ),
    "an unknown clock": (but(clock=Clock(None, None)), {}),
    "a full disk": (but(runs={"free": 1 << 20}), {"disk": ("error", "1 MiB free", "--log-dir")}),
    "a disk that is nearly full": (but(runs={"free": GIB // 2}), {"disk": ("warning", "512 MiB free", "make room")}),
    "a disk of others": (but(runs={"is_writable": False}), {"disk": ("error", "cannot be written", "--log-dir")}),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_said_of_other_machines(machine: str) -> None:
    facts, expected = MACHINES[machine]
    found = ailments(facts)
    assert set(found) == set(expected)
    for name, (verdict, value, advice) in expected.items():
        assert found[name].verdict == verdict
        assert value in found[name].value
        assert advice in found[name].advice
    assert command.exit_code(command.examine(facts)) == any(verdict == "error" for verdict, *_ in expected.values())
    for line in command.lines(command.examine(facts)):
        assert "None" not in line
        assert "\n" not in line


def test_gpus_are_counted_and_give_the_number_of_ranks() -> None:
    gpus = (Gpu("A100", 80 * GIB), Gpu("A100", 80 * GIB), Gpu("T4", 16 * GIB))
    facts = but(torch={"cuda": "12.4", "gpus": gpus, "backends": ("gloo", "nccl")}, gpus={"driver": "550.54"})
    told = {each.name: each.value for each in command.examine(facts)}
    assert told["devices"] == "2 × A100 with 80.0 GiB, 1 × T4 with 16.0 GiB, driver 550.54, CUDA 12.4"
    assert told["threads"] == "3 ranks × 1 thread on 4 cores"


def test_the_lines() -> None:
    findings = [Finding("a", "fine"), Finding("long name", "bad", "error", "mend it"), Finding("b", "so", "info")]
    assert command.lines(findings) == [
        "ok       a          fine",
        "error    long name  bad; mend it",
        "–        b          so",
        "1 ok, 0 warnings, 1 error",
    ]


def test_the_same_numbers_as_phalanx_run() -> None:
    assert [machine.files_needed(n) for n in (1, 64)] == [launch_command.files_needed(n) for n in (1, 64)]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_limits_of_containers(tmp_path: Path) -> None:
    second = tree(
        tmp_path / "v2",
        {
            "membership": "0::/pod/box",
            "pod/cpu.max": "50000 100000",
            "pod/box/cpu.max": "max 100000",
            "pod/box/memory.max": "1000",
            "pod/box/memory.current": "700",
            "pod/box/memory.stat": "anon 5\ninactive_file 300",
            "pod/memory.max": "5000",
            "pod/memory.current": "700",
            "memory.max": "max",
            "pod/pids.max": "64",
            "pod/pids.current": "9",
        },
    )
    assert allowance(second, second / "membership") == Allowance(1000, 400, 64, 9)
    first = tree(
        tmp_path / "v1",
        {
            # the path is the host's, and is not there within the container
            "membership": "4:memory:/docker/4711\n1:cpu,cpuacct:/docker/4711\n0::/",
            "cpu/cpu.cfs_quota_us": "150000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "2000",
            "memory/memory.usage_in_bytes": "900",
            "memory/memory.stat": "total_inactive_file 100",
        },
    )
    assert allowance(first, first / "membership") == Allowance(2000, 800, None, 0)
    free = tree(
        tmp_path / "free",
        {
            "membership": "4:memory:/\n1:cpu:/",
            "cpu/cpu.cfs_quota_us": "-1",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert allowance(free, free / "membership") == Allowance()
    assert allowance(tmp_path, tmp_path / "nowhere") == Allowance()


def test_whose_phalanx_is_on_path(tmp_path: Path) -> None:
    """Told apart by the interpreter that its first lines name, however they are written."""
    here = Path(sys.executable)
    other = tmp_path / "env/bin/python"
    other.parent.mkdir(parents=True)
    other.symlink_to(here.resolve())  # as in every virtual environment
    command = tmp_path / "phalanx"
    for first, expected in (
        (f"#!{here}", True),
        (f"#!{here.with_name('python3')}", True),
        (f"#!{other}", False),
        (f'#!/bin/sh\n\'\'\'exec\' "{other}" "$0" "$@"', False),
        (f"#!/bin/sh\n'''exec' {here} \"$0\" \"$@\"", True),
        ("#!/usr/bin/env bash\nexec pyenv exec phalanx", None),
    ):
        command.write_text(f"{first}\nmain()\n")
        command.chmod(0o755)
        found = software.read_python({"PATH": str(tmp_path), "VIRTUAL_ENV": str(tmp_path / "env")})
        assert (found.command, found.command_is_ours) == (str(command), expected), first
        assert found.active == str(tmp_path / "env")
    assert software.read_python({"PATH": "/nowhere"}).command is None


def test_a_probe_that_dies_is_a_finding() -> None:
    assert torch_probe.parse("", "Illegal\ninstruction", -4).problem == (
        "importing it ended the interpreter with signal SIGILL (instruction)"
    )
    assert torch_probe.parse("", "", 3).problem == "importing it ended the interpreter with exit code 3"


def test_names_and_ports_are_asked_for_real(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    assert network.resolve("127.0.0.1") == (("127.0.0.1",), None)
    addresses, problem = network.resolve("no-such-host.invalid")
    assert (addresses, problem is None) == ((), False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (network.holder(port) or "").startswith(f"pid {os.getpid()} (")
    assert network.holder(port) is None
    asked, answered = socket.socketpair()
    with asked, answered:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: asked.recv(1) and [])
        assert network.resolve("slow", timeout=0.05) == ((), "no answer within 0.05 s")
        answered.send(b"x")  # so that the thread can end


def test_this_machine(phalanx: Runner) -> None:
    """All for real; what this machine lacks is not the doctor's fault, so only what the tests need is asserted."""
    outcome = phalanx("doctor", "--json", "--nproc_per_node", "2")
    findings = json.loads(outcome.out)
    assert all(list(each) == ["name", "value", "verdict", "advice"] for each in findings)
    assert all(each["verdict"] in ("ok", "warning", "error", "info") for each in findings)
    assert all(bool(each["advice"]) == (each["verdict"] in ("warning", "error")) for each in findings)
    assert outcome.code == any(each["verdict"] == "error" for each in findings)
    assert outcome.err == ""
    told = {each["name"]: each for each in findings}
    assert [name for name in told if name not in FOR_GPUS] == ALWAYS
    torch, numpy = _versions("torch", "numpy")
    assert re.fullmatch(rf"{re.escape(torch)}(\+\w+)?, imported in \d+\.\d s", told["torch"]["value"])
    assert told["numpy"]["value"] == numpy
    assert told["C library"] == {**told["C library"], "verdict": "ok", "advice": ""}
    assert told["C library"]["value"].startswith("version ")
    assert told["backends"]["value"].startswith("shm, gloo")
    assert told["python"]["value"].endswith(sys.executable)
    assert told["threads"]["value"].startswith("2 ranks × ")
    assert f" usable of {os.cpu_count()}" in told["cores"]["value"]


def _versions(*packages: str) -> list[str]:
    from importlib import metadata

    return [metadata.version(package).partition("+")[0] for package in packages]


def test_a_broken_torch_is_a_line_and_the_exit_code(phalanx: Runner, tmp_path: Path) -> None:
    tree(tmp_path / "elsewhere/torch", {"__init__.py": "print('noise')\nraise OSError('libgomp.so.1: not found')"})
    outcome = phalanx("doctor", env={"PYTHONPATH": str(tmp_path / "elsewhere"), "OMP_NUM_THREADS": "32"})
    assert (outcome.code, outcome.err) == (1, "")
    (line,) = [line for line in outcome.lines if line.startswith("error")]
    file = tmp_path / "elsewhere/torch/__init__.py"
    assert re.match(rf"error    torch +cannot be imported from {file}: OSError: libgomp.so.1: not found; .*unset", line)
    assert any(re.match(r"warning  threads .*OMP_NUM_THREADS=32; .*unset OMP_NUM_THREADS", x) for x in outcome.lines)
    assert any(re.match(r"–        backends +not asked", line) for line in outcome.lines)
    assert len(outcome.lines) > len(ALWAYS)
    assert re.fullmatch(r"\d+ ok, \d+ warnings?, 1 error", outcome.lines[-1])


def test_a_torch_that_crashes_and_a_terminal(tmp_path: Path) -> None:
    tree(tmp_path / "torch", {"__init__.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"})
    primary, secondary = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-m", "phalanx", "doctor"],
        env=environment,
        cwd=tmp_path,
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
    ) as process:
        os.close(secondary)
        seen = read_terminal(primary).decode()
    assert process.returncode == 1
    assert "\x1b[1;31merror" in seen
    plain = re.sub(r"\x1b\[[\d;]*m", "", seen).replace("\r\n", "\n")
    assert re.search(r"^error +torch +cannot be imported: importing it ended the interpreter", plain, re.MULTILINE)
    assert "signal SIGSEGV" in " ".join(plain.split())
    assert all(len(line) <= 80 for line in plain.splitlines())
    assert re.search(r"^ +\x1b\[1;31m→ ", seen, re.MULTILINE), "the advice has the colour of its verdict"


def test_nothing_is_left_when_it_is_killed(tmp_path: Path) -> None:
    """While torch is being imported; the leak police looks for the process that does it."""
    started = tmp_path / "started"
    os.mkfifo(started)
    code = f"import signal\nopen({str(started)!r}, 'w').close()\nsignal.pause()"
    tree(tmp_path / "torch", {"__init__.py": code})
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-m", "phalanx", "doctor"], env=environment, cwd=tmp_path) as process:
        started.read_text()  # until torch is being imported
        process.kill()
    assert process.returncode == -9


def test_the_page_has_every_line() -> None:
    rows = re.findall(
        r"^\| ([^|`]+) \| [^|]+ \| [^|]+ \|$", (REPOSITORY / "docs/diagnose.md").read_text(), re.MULTILINE
    )
    assert rows[0] == "line"
    assert rows[2:] == list(command.CHECKS)


def test_help_and_wrong_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("warning", "error", "exit code", "--json", "--nproc-per-node"):
        assert word in text
    for wrong in (["--nproc-per-node", "0"], ["--nproc-per-node", "many"], ["2", "--node"]):
        with pytest.raises(UsageError, match=wrong[-1]):
            command.main(wrong)


def test_it_starts_without_torch() -> None:
    code = "import sys, phalanx.diagnose.doctor.command; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "False\n"
