"""The hosts that one command starts: their notations, what travels to them, what their failures are called."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx import messages, secret
from phalanx.entry_point import python_command
from phalanx.errors import LaunchError, UsageError
from phalanx.launch import command, dry_run
from phalanx.launch import parse as launch_parse
from phalanx.launch.output import wire_protocol
from phalanx.launch.output.agent_lines import AgentLines
from phalanx.launch.remote import compatibility, transports
from phalanx.launch.remote.host_connection import HostConnection
from phalanx.launch.spec import hosts
from phalanx.launch.spec.launch_spec import Host, HostList, LaunchSpec, Placement, Program, worker_environment


def parse(*argv: str, **environ: str) -> LaunchSpec:
    return launch_parse.parse(list(argv), environ)[0]


def host_list(*argv: str, **environ: str) -> HostList:
    found = parse(*argv, "train.py", **environ).host_list
    assert found is not None
    return found


# ---- notations


def test_hosts_of_every_kind() -> None:
    assert host_list("-H", "a:8,me@b.example:4, [fd00::7]:2,me@[fe80::1%eth0],10.0.0.9").hosts == (
        Host("a", 8),
        Host("b.example", 4, "me"),
        Host("fd00::7", 2),
        Host("fe80::1%eth0", None, "me"),
        Host("10.0.0.9"),
    )
    assert Host("fd00::7", 2, "me").target == "me@fd00::7"
    assert host_list(PET_HOSTS="a,b:2").hosts == (Host("a"), Host("b", 2))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,,b", "--hosts has '', which is no host"),
        ("", "--hosts has '', which is no host"),
        ("a:0", "--hosts has 'a:0', but the number of processes is a whole number from 1 to 10000"),
        ("a:999999999", "but the number of processes is a whole number from 1 to 10000"),
        ("a:" + "9" * 5000, "but the number of processes is a whole number from 1 to 10000"),
        ("a:x", "--hosts has 'a:x', but the number"),
        ("a:", "--hosts has 'a:', but the number"),
        ("a:²", "but the number"),
        ("fd00::7", r"--hosts has 'fd00::7', which is no host; write .* or \[fd00::7\]:8 for IPv6"),
        ("a b", "--hosts has 'a b', which is no host"),
        ("-oProxyCommand=x", "which is no host"),
        ("me@-x", "a name cannot begin with a dash"),
        ("a:2,b,me@a:3", "names a twice; give each host once"),
    ],
)
def test_hosts_that_are_none(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse(f"--hosts={text}", "train.py")


def test_a_hostfile(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# the cluster\n\n  a slots=8   # big\nme@b:4\n[fd00::7] slots=1\nc\n")
    assert host_list("--hostfile", str(file)).hosts == (Host("a", 8), Host("b", 4, "me"), Host("fd00::7", 1), Host("c"))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a\nb slots=0\n", "line 2 of .*hosts has 'slots=0', but the number of processes"),
        ("a slots=99999999999999999999\n", "has 'slots=9+', but the number of processes is .* 1 to 10000"),
        ("a\n\n# x\nb gpus=8\n", "line 4 of .*hosts has 'gpus=8', which is unknown there; write `b slots=8`"),
        ("a:2 slots=3\n", "line 1 of .*hosts has 'slots=3', which is unknown there"),
        ("a\nb\na slots=2\n", "line 3 of .*hosts names a twice"),
        ("@b\n", "line 1 of .*hosts has '@b', which is no host"),
        ("# nobody\n", "names no host; write one per line"),
        ("\udcff", "cannot be read: it is no text"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_hostfile_that_is_wrong(content: str | None, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=sentence):
        parse("--hostfile", str(file), "train.py")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--hostfile", "x"], "--hosts and --hostfile contradict each other"),
        (["--nnodes", "3"], r"--nnodes 3, but 2 host\(s\) are given; leave out --nnodes"),
        (["--node-rank", "1"], "--node-rank is for one command on each machine"),
        (["--standalone"], "--standalone is for one command"),
        (["--master-addr", "127.0.0.1"], "--master-addr 127.0.0.1 means another machine on each of the 2 hosts; leave"),
        (["--master-addr", "localhost"], "--master-addr localhost means another machine on each"),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1"], "--rdzv-endpoint is for one command"),
        (["--ssh", "ssh 'x"], r"--ssh \"ssh 'x\" cannot be read"),
        (["--ssh", ""], "--ssh is empty"),
        (["--export", "A=1"], "--export has 'A=1'; give names of variables"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout is -1"),
    ],
)
def test_flags_beside_hosts(flags: list[str], sentence: str) -> None:
    assert host_list("-H", "a,b", "--nnodes", "2", "--ssh", "ssh -p 7", "--export", "A, B") == HostList(
        (Host("a"), Host("b")), "ssh", ("ssh", "-p", "7"), ("A", "B")
    )
    with pytest.raises(UsageError, match=sentence):
        parse("-H", "a,b", *flags, "train.py")


def test_one_host_that_is_this_machine_is_a_plain_run() -> None:
    for name in ("localhost", socket.gethostname(), "127.0.0.1"):
        spec = parse("-H", f"{name}:3", "train.py")
        assert (spec.host_list, spec.nproc_per_node, spec.nnodes) == (None, 3, (1, 1))
    assert parse("-H", "localhost", "--nproc-per-node", "2", "train.py").nproc_per_node == 2
    assert not hosts.is_here(Host("localhost", 3, "me")), "another user is another place"
    assert not hosts.is_here(Host("203.0.113.7"))
    assert host_list("-H", "elsewhere.invalid").hosts == (Host("elsewhere.invalid"),)


def test_gpus_are_counted_there_not_here() -> None:
    spec = parse("-H", "a,b", "--nproc-per-node", "gpu", "--devices", "0,9", "train.py", CUDA_VISIBLE_DEVICES="0")
    assert spec.nnodes == (2, 2)
    remote = {"hosts": None, "hostfile": None, "nnodes": "2", "node_rank": 1, "nproc_per_node": "2"}
    argv = ["-H", "a,b", "--nproc-per-node", "7", "--tee", "3", "train.py"]
    there, _ = launch_parse.parse(argv, {}, remote)
    assert (there.host_list, there.nproc_per_node, there.node_rank, there.tee) == (None, 2, 1, {0: 3, 1: 3})


def test_the_table_has_host_names(capsys: pytest.CaptureFixture[str]) -> None:
    spec, is_dry = launch_parse.parse(["-H", "alpha:2,beta", "--dry-run", "--nproc-per-node", "1", "train.py"], {})
    assert is_dry
    dry_run.show(spec, {})
    shown = capsys.readouterr().out
    assert "2 nodes, 2 + 1 processes = 3 ranks" in shown
    rows = [line.split()[:4] for line in shown.splitlines() if "RANK=" in line]
    assert rows == [["0", "alpha", "0", "0"], ["0", "alpha", "1", "1"], ["1", "beta", "2", "0"]]
    assert "MASTER_ADDR=(that of alpha)" in shown


# ---- SLURM

BATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_PROCID": "0", "SLURMD_NODENAME": "gpu1"}
TASK = {**BATCH, "SLURM_STEP_ID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "1"}
TASK |= {"SLURM_STEP_NODELIST": "gpu[1-2]", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"}


def test_an_allocation_of_slurm() -> None:
    assert host_list(**BATCH) == HostList((Host("gpu1"), Host("gpu2")), "srun")
    assert host_list("-H", "a,b", **BATCH).transport == "ssh", "who names hosts is asked nothing"
    for flags in (["--nnodes", "1"], ["--standalone"], ["--nnodes", "2", "--node-rank", "1"]):
        assert parse(*flags, "train.py", **BATCH).host_list is None
    with pytest.raises(UsageError, match=r"SLURM's list of hosts 'gpu\[9-\]' cannot be read; .* with -H"):
        parse("train.py", **{**BATCH, "SLURM_JOB_NODELIST": "gpu[9-]"})


def test_an_allocation_of_one_node() -> None:
    """A batch script is on the node; a shell of salloc is on another machine."""
    one = {**BATCH, "SLURM_JOB_NODELIST": "gpu1", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
    spec = parse("train.py", **one)
    assert (spec.host_list, spec.nproc_per_node) == (None, 4)
    assert parse("--nproc-per-node", "8", "train.py", **one).nproc_per_node == 8
    del one["SLURMD_NODENAME"]
    assert host_list(**one) == HostList((Host("gpu1", 4),), "srun")


def test_tasks_of_an_allocation_are_its_ranks() -> None:
    tasks = {**BATCH, "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "3,1"}
    assert host_list(**tasks).hosts == (Host("gpu1", 3), Host("gpu2", 1))
    assert host_list("--nproc-per-node", "2", **tasks).hosts == (Host("gpu1"), Host("gpu2"))
    for asked, gpus in (("1", ("3", "1")), ("a100:2", ("a100:6", "a100:2"))):
        found = host_list("--nproc-per-node", "2", **tasks, SLURM_GPUS_PER_TASK=asked)
        assert tuple(host.gpus for host in found.hosts) == gpus, "otherwise an agent would get the GPUs of one task"
        assert f"--gpus-per-node={gpus[0]}" in transports.find_transport(found.hosts[0], found).command
    assert host_list(**{**BATCH, "SLURM_TASKS_PER_NODE": "8(x2)"}).hosts == (Host("gpu1"), Host("gpu2"))


def test_tasks_of_srun_are_one_run() -> None:
    spec = parse("train.py", **TASK)
    assert (spec.host_list, spec.nnodes, spec.node_rank, spec.nproc_per_node) == (None, (3, 3), 1, 1)
    assert (spec.master_addr, spec.master_port, spec.run_id) == ("gpu1", 15220, "slurm-7.3")
    environ = worker_environment({}, spec, Placement(1, 0, 1, 3, 1, 3), ("10.0.0.1", 5), 0, "x")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    assert [environ[name] for name in names] == ["1", "3", "1", "2", "0", "2"], "as of one agent on each node"
    for flags in (["--nnodes", "1"], ["--standalone"], ["--nnodes", "3", "--node-rank", "2"]):
        assert parse(*flags, "train.py", **TASK).task is None
    alone = {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
    assert parse("--nproc-per-node", "4", "train.py", **alone).nnodes == (1, 1)
    for flags, sentence in (
        (["--nproc-per-node", "2"], "several tasks on a node, and each is asked for 2 processes; leave out"),
        (["-H", "a,b"], "srun has started 3 tasks, and each would start all hosts"),
    ):
        with pytest.raises(UsageError, match=sentence):
            parse(*flags, "train.py", **TASK)


def test_one_task_on_each_node_starts_its_ranks() -> None:
    each = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    spec = parse("--nproc-per-node", "8", "--master-addr", "ib0", "--master-port", "99", "train.py", **each)
    assert (spec.nnodes, spec.node_rank, spec.nproc_per_node, spec.task_place) == ((2, 2), 1, 8, None)
    assert (spec.master_addr, spec.master_port) == ("ib0", 99)


def test_the_threads_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its share of the CPUs that the step has here, whether SLURM has bound it to them or not."""
    spec = LaunchSpec(Program("script", "train.py"), task=Placement(0, 0, 0, 4, 4, 1))
    for usable, given, threads in ((16, "16", "4"), (4, "16", "4"), (64, "8", "2"), (16, "2", "1"), (16, "", "4")):
        monkeypatch.setattr(command.cgroups, "usable_cores", lambda usable=usable: usable)
        assert command._threads(spec, {"SLURM_CPUS_ON_NODE": given}) == {"OMP_NUM_THREADS": threads}
    assert command._threads(spec, {"OMP_NUM_THREADS": "7"}) == {}


# ---- what travels, and how


def test_the_forwarded_variables() -> None:
    goes = (
        *("PATH", "PYTHONPATH", "CONDA_PREFIX", "OMP_NUM_THREADS", "NCCL_DEBUG", "TORCH_HOME", "PHALANX_BACKEND"),
        *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "FI_PROVIDER", "UCX_TLS", "HSA_FORCE_FINE_GRAIN_PCIE"),
        *("HIP_LAUNCH_BLOCKING", "TRITON_CACHE_DIR", "ZE_FLAT_DEVICE_HIERARCHY", "CCL_ATL_TRANSPORT", "HCCL_IF_IP"),
    )
    stays = (
        *("HOME", "SSH_AUTH_SOCK", "AWS_SECRET", "TORCHELASTIC_RUN_ID", "PHALANX_RUN_TOKEN"),
        *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
        "ZE_AFFINITY_MASK",
    )
    environ: dict[str, str] = dict.fromkeys((*goes, *stays, "MY_TOKEN"), "x")
    assert sorted(transports.forwarded_environment(environ, ())) == sorted(goes)
    assert sorted(transports.forwarded_environment(environ, ("MY_TOKEN", "CUDA_VISIBLE_DEVICES"))) == sorted(
        (*goes, "MY_TOKEN", "CUDA_VISIBLE_DEVICES")
    )
    with pytest.raises(UsageError, match="--export MISSING: there is no such variable here"):
        transports.forwarded_environment(environ, ("MISSING",))


REMOTE = python_command("phalanx.launch.command.remote()")


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_the_users_settings_win(tmp_path: Path) -> None:
    """Ours stand in for ssh's defaults alone. What ssh makes of all of them it tells itself."""
    config = tmp_path / "config"
    config.write_text("Host b\n  ServerAliveInterval 60\n  ConnectTimeout 7\n  ControlMaster auto\n")
    ssh = ("ssh", "-F", str(config), "-o", "BatchMode=no")
    for name, interval, timeout in (("a", "5", "20"), ("b", "60", "7")):
        way = transports.find_transport(Host(name, 2, "me"), HostList((), "ssh", ssh))
        assert way.command[-2] == f"me@{name}"
        command = [*way.command[:-2], "-G", way.command[-2]]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert f"serveraliveinterval {interval}" in told
        assert f"connecttimeout {timeout}" in told
        assert "controlmaster false" in told
        assert "batchmode no" in told, "a word of --ssh beats ours"


def test_command_lines() -> None:
    here = transports.find_transport(Host("localhost"), HostList(()))
    assert (here.kind, list(here.command)) == ("here", REMOTE)
    srun = transports.find_transport(Host("gpu1"), HostList((), "srun"))
    assert srun.command[0] == "srun"
    assert "--nodelist=gpu1" in srun.command
    assert list(srun.command[-len(REMOTE) :]) == REMOTE


@pytest.mark.parametrize(
    ("kind", "code", "said", "sentence"),
    [
        (
            "ssh",
            255,
            ["hello", "ssh: connect to host n port 22: No route to host"],
            "n cannot be reached: ssh: connect",
        ),
        ("ssh", 255, ["me@n: Permission denied (publickey)."], "`ssh me@n true` must work without one"),
        ("ssh", 127, ["bash: line 1: x: No such file"], f"n: there is no interpreter {sys.executable}"),
        ("srun", 126, [], f"n: there is no interpreter {sys.executable}"),
        ("ssh", 1, ["ModuleNotFoundError: No module named 'phalanx'"], "n: phalanx is not installed for"),
        (
            "srun",
            1,
            ["srun: error: Unable to create step"],
            "n: the start failed with exit code 1: srun: error: Unable",
        ),
        ("here", -9, [], "n: the start failed with SIGKILL: it printed nothing."),
    ],
)
def test_why_a_host_does_not_start(kind: transports.Kind, code: int, said: list[str], sentence: str) -> None:
    assert sentence in transports.Transport(Host("n", None, "me"), kind, ()).why_not_started(code, said)


@pytest.mark.parametrize(
    ("kind", "code", "said", "sentence"),
    [
        (
            "ssh",
            255,
            ["Timeout, server n not responding."],
            "connection to n was lost: Timeout, server n not responding",
        ),
        ("ssh", 255, ["[n rank 0] Connection to my db was lost"], "the agent on n was killed"),
        ("ssh", -15, [], "the connection to n was lost: ssh ended with SIGTERM"),
        ("ssh", 1, ["Timeout"], "the agent on n ended without a message, with exit code 1"),
        ("srun", 137, [], "the agent on n ended without a message, with exit code 137"),
    ],
)
def test_why_a_host_is_lost(kind: transports.Kind, code: int, said: list[str], sentence: str) -> None:
    assert sentence in transports.Transport(Host("n"), kind, ()).why_lost(code, said)


@pytest.fixture
def run_secret() -> Iterator[None]:
    before = secret.text()
    secret.keep("11" * 32)
    yield
    secret.keep(before)


def test_messages_among_lines(run_secret: None) -> None:
    """In any pieces, behind a greeting, and behind a line that has no end; never what was not sealed, or twice."""
    hello = wire_protocol.Hello("3.11", "2.13.0", "1", 2, None, None, None, None)
    first, said = wire_protocol.marked(hello, "n"), wire_protocol.Lines("a\nb", "")
    message = wire_protocol.marked(said, "n")
    foreign = b'\x1ephalanx\x1e no\n\x1ephalanx\x1e[]\n\x1ephalanx\x1e{"ended": 0}\n'
    foreign += message + wire_protocol.marked(said, "another") + b"[rank 0] two"
    text = b"Welcome!\n" + first + b"[rank 0] one\nhalf" + message + foreign
    for size in (1, 3, 7, len(text)):
        heard: list[object] = []
        message_filter = wire_protocol.MessageFilter(wire_protocol.Inbox("n", heard.append))
        kept = b""
        for at in range(0, len(text), size):
            kept += message_filter.feed(text[at : at + size])
            message_filter.is_open = bool(heard)
        kept += message_filter.finish()
        assert heard == [hello, said]
        if size < len(text):
            assert kept == b"[rank 0] one\nhalf\n" + foreign + b"\n"


def connection(name: str, node: int, kind: transports.Kind, **hello: Any) -> HostConnection:
    """One that has answered."""
    told = messages.replace(wire_protocol.Hello("3.11", "2.13.0", "1", 2, 4000, None, None, None), **hello)
    transport = transports.Transport(Host(name), kind, ())
    return cast(HostConnection, SimpleNamespace(name=name, node=node, transport=transport, hello=told))


def test_where_they_meet() -> None:
    spec = parse("train.py")
    by_ssh = [connection("a", 0, "ssh", server="10.0.0.1"), connection("b", 1, "ssh", client="10.0.0.9")]
    assert compatibility.master(by_ssh, spec) == ("10.0.0.1", 4000)
    chosen = parse("--master-addr", "ib0.a", "--master-port", "29500", "train.py")
    assert compatibility.master(by_ssh, chosen) == ("ib0.a", 29500)
    from_here = [connection("a", 0, "here"), connection("b", 1, "ssh", client="10.0.0.9", first="10.0.0.8")]
    assert compatibility.master(from_here, spec) == ("10.0.0.9", 4000)
    by_srun = [connection("a", 0, "srun"), connection("b", 1, "srun", first="10.0.0.7")]
    assert compatibility.master(by_srun, spec) == ("10.0.0.7", 4000)
    for useless in ("127.0.0.1", "fe80::1%eth0", None):
        with pytest.raises(LaunchError, match="by which address the other hosts reach a; give it with --master-addr"):
            compatibility.master([connection("a", 0, "ssh", server=useless), by_ssh[1]], spec)


def test_whether_they_fit() -> None:
    same = [connection(name, node, "ssh") for node, name in enumerate("ab")]
    compatibility.compare(same)
    assert compatibility.summary(same) == "4 ranks on 2 hosts: a 0-1, b 2-3"
    with pytest.raises(LaunchError, match=r"^c has Python 3.9, but a has 3.11; install .*\nc has phalanx 2, but"):
        compatibility.compare([*same, connection("c", 2, "ssh", python="3.9", phalanx="2")])


def test_what_an_agent_says(run_secret: None) -> None:
    written: list[bytes] = []
    console = SimpleNamespace(err=2, put=lambda source, fd, data, on_a_new_line: written.append(data))
    for node in (None, "n1"):
        AgentLines(cast(Any, console), node).say(["one", " two"], "verdict")
    assert written[0] == b"phalanx: one\n two\n"
    assert written[1].startswith(wire_protocol.MARK)
