"""One command starts the machines of a run over a real ssh, and ends them; its console tells everything once."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import phalanx
from phalanx.testing import Node, VirtualNodes, virtual_nodes

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root"),
    pytest.mark.skipif(not (SSHD and shutil.which("ssh")), reason="needs ssh and sshd: install openssh-server"),
]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist, phalanx as px
with px.init() as world:
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    place = [world.rank, world.size, world.local_rank, world.node, os.uname().nodename]
    print("place", *place, total.item(), os.environ["MASTER_ADDR"], os.environ.get("SECRET"), flush=True)
    print("aside", world.rank, file=sys.stderr, flush=True)
    what, who = (sys.argv[1:] + ["", ""])[:2]
    if what == "exit" and world.rank == int(who):
        sys.exit(7)
    if what == "raise" and world.rank == int(who):
        raise ValueError("on purpose")
    if what == "sleep" and world.rank == int(who):
        time.sleep(1000)
    while what == "stay":
        dist.all_reduce(total)
        time.sleep(0.1)
    dist.barrier()
"""


@dataclass(frozen=True)
class Site:
    """Two hosts with ssh's server, and a desk that reaches them."""

    nodes: VirtualNodes
    config: Path
    """Of ssh's client."""

    @property
    def desk(self) -> Node:
        return self.nodes[2]

    def start(
        self, place: Path, *words: str, at: Node | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """``phalanx run …`` at the desk. The ranks get the mark by which the leak police knows what is ours."""
        place.mkdir(exist_ok=True)
        (place / "train.py").write_text(TRAIN)
        flags = ["--ssh", f"ssh -F {self.config}", "--export", ",".join(["PHALANX_TEST", *(env or {})])]
        return (at or self.desk).start(
            [sys.executable, "-m", "phalanx", "run", *flags, *words],
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, place: Path, *words: str, **options) -> tuple[int, str, str]:
        return end(self.start(place, *words, **options))


def end(process: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Nothing of the machine's own ssh is read or written: keys, settings and /run are the test's."""
    place = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / name], check=True)
    (place / "sshd_config").write_text(
        f"HostKey {place}/host\nAuthorizedKeysFile {place}/user.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n"
    )
    config = place / "config"
    config.write_text(
        "Host stranger\n  Hostname node1\n  PubkeyAuthentication no\n"
        "Host closed\n  Hostname node1\n  Port 2222\n"
        "Host unseen\n  Hostname node1\n  UserKnownHostsFile none\n  StrictHostKeyChecking yes\n"
        f"Host *\n  IdentityFile {place}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {place}/known\n"
        "  StrictHostKeyChecking accept-new\n  ServerAliveInterval 1\n  ServerAliveCountMax 3\n"
    )
    with virtual_nodes(3, loopback_names=True) as nodes:
        for node in nodes[:2]:
            node.run(["sh", "-c", "mount -t tmpfs tmpfs /run && mkdir /run/sshd"], check=True)
            log = place / f"{node.name}.log"
            with log.open("w") as file:
                node.start([str(SSHD), "-D", "-e", "-f", str(place / "sshd_config")], stdin=-3, stderr=file)
            await_that(lambda log=log: "Server listening" in log.read_text(), "sshd listens")
        yield Site(nodes, config)


def await_that(what: Callable[[], object], name: str, seconds: float = 20) -> None:
    """For what no event tells."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, f"not within {seconds} s: {name}"
        time.sleep(0.05)


def await_lines(process: subprocess.Popen[str], text: str, count: int = 1) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        count -= text in line
        if count == 0:
            return
    raise AssertionError(f"ended without saying {text!r}: {process.communicate()[1]}")


@functools.cache
def namespace(node: Node) -> str:
    return node.run(["readlink", "/proc/self/ns/pid"], check=True).stdout.strip()


def processes(node: Node, having: str) -> list[int]:
    """Of the node, whose command line has a text; by their pids here. From outside: `ps`, asked often, is expensive."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if having in words and os.readlink(place / "ns/pid") == namespace(node):
                found.append(int(place.name))
    return found


def await_nothing(site: Site, seconds: float = 10) -> None:
    """A remote whose ssh was ended notices that by itself, a moment later."""
    await_that(lambda: not any(processes(node, "phalanx.launch") for node in site.nodes), "nothing runs", seconds)


# ---- they run


def test_places_and_streams(site: Site, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\nnode0 slots=2\n\nroot@node1  # as --nproc-per-node says\n")
    code, out, err = site.run(tmp_path, "--hostfile", str(hostfile), "train.py", env={"SECRET": "s"})
    assert code == 0, err
    address = site.nodes[0].address
    assert sorted(out.splitlines()) == [
        f"[node0 rank 0] place 0 3 0 0 node0 3.0 {address} s",
        f"[node0 rank 1] place 1 3 1 0 node0 3.0 {address} s",
        f"[node1 rank 2] place 2 3 0 1 node1 3.0 {address} s",
    ]
    for node, rank in (("node0", 0), ("node0", 1), ("node1", 2)):
        assert f"[{node} rank {rank}] aside {rank}\n" in err
    assert "phalanx: 3 ranks on 2 hosts: node0 0-1, node1 2\n" in err


def test_this_machine_is_the_first(site: Site, tmp_path: Path) -> None:
    """Without ssh: node0 cannot log in to itself. Its address is the one that the others see."""
    flags = ("--nproc-per-node", "1", "-H", "node0,node1")
    process = site.start(tmp_path, *flags, "train.py", "stay", at=site.nodes[0], env={"SECRET": "xyzzy"})
    await_lines(process, f"{site.nodes[0].address} xyzzy", 2)
    seen = [node.run(["ps", "-eo", "args=", "-ww"], check=True).stdout for node in site.nodes[:2]]
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert "phalanx.launch.command.remote" in seen[0]
    assert "phalanx.launch.command.remote" in seen[1]
    assert "xyzzy" not in "".join(seen), "nothing secret on a command line"
    assert "train.py" not in seen[1], "nor anything else of the user's"
    assert code == 130
    assert err.count("SIGINT: stopping the ranks") == 1
    assert "Traceback" not in err
    await_nothing(site)


def test_one_host_elsewhere(site: Site, tmp_path: Path) -> None:
    code, out, err = site.run(tmp_path, "-H", "node1:1", "train.py")
    assert (code, out) == (0, "place 0 1 0 0 node1 0.0 127.0.0.1 None\n"), err


# ---- they do not start


FAULTS = {
    "nowhere": "nowhere cannot be reached: ssh: Could not resolve hostname nowhere",
    "closed": "closed cannot be reached: ssh: connect to host node1 port 2222: Connection refused.",
    "stranger": "stranger cannot be reached: root@node1: Permission denied (publickey); there is nobody to type a "
    "password, so `ssh stranger true` must work without one (a key, an agent).",
    "unseen": "unseen cannot be reached: Host key verification failed; its key is not known here, or has changed: try "
    "`ssh unseen true` by hand.",
}


def test_hosts_that_are_not_reached(site: Site, tmp_path: Path) -> None:
    """All are named at once, and what was started elsewhere is ended."""
    code, out, err = site.run(tmp_path, "-H", ",".join(["node0", *FAULTS]), "train.py")
    assert (code, out) == (2, "")
    for sentence in FAULTS.values():
        assert sentence in err
    assert "Traceback" not in err
    await_nothing(site)


@contextlib.contextmanager
def other_file(node: Node, path: Path, content: Path | None = None) -> Iterator[None]:
    """On this node a path shows something else: a file, or (None) an empty directory."""
    what = ["--bind", str(content)] if content else ["-t", "tmpfs", "tmpfs"]
    node.run(["mount", *what, str(path)], check=True)
    try:
        yield
    finally:
        node.run(["umount", str(path)], check=True)


def missing(what: str, place: Path) -> tuple[Path, Path | None, str]:
    """A path of node1, what it shows there, and the sentence."""
    python = Path(sys.executable)
    dist = Path(str(metadata.distribution("torch").locate_file("")))
    version = metadata.version("torch")
    described = next(dist.glob("torch-*.dist-info")) / "METADATA"
    match what:
        case "interpreter":
            return python.parent, None, f"node1: there is no interpreter {python} that can be executed; make the same"
        case "phalanx":
            return Path(phalanx.__file__).parent, None, f"node1: phalanx is not installed for {python} there"
        case "torch":
            return described.parent, None, f"node1: torch is not installed for {python} there; install it."
        case "another torch":
            other = place.parent / "METADATA"
            other.write_text(described.read_text().replace(f"Version: {version}", "Version: 2.4.1"))
            return described, other, f"node1 has torch 2.4.1, but node0 has {version}; install the same on all hosts."
        case "script":
            return place, None, f"node1: the script train.py does not exist (looked in {place})."
        case _:
            return place.parent, None, f"node1: the working directory {place} cannot be entered there (No such file"


@pytest.mark.parametrize("what", ["interpreter", "phalanx", "torch", "another torch", "script", "directory"])
def test_what_is_missing_there(what: str, site: Site, tmp_path: Path) -> None:
    place = tmp_path / "site" / "work"
    place.mkdir(parents=True)
    path, content, sentence = missing(what, place)
    with other_file(site.nodes[1], path, content):
        code, out, err = site.run(place, "-H", "node0,node1", "train.py")
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
    await_nothing(site)


def test_without_ssh_and_with_a_wrong_count(site: Site, tmp_path: Path) -> None:
    code, _, err = site.run(tmp_path, "--ssh", "no-such-ssh -p 1", "-H", "node0,node1", "train.py")
    assert (code, err) == (
        2,
        "phalanx: the program no-such-ssh was not found; install it, or name another with --ssh.\n",
    )
    code, _, err = site.run(tmp_path, "-H", "node0,node1", "--nproc-per-node", "gpu", "train.py")
    assert code == 2
    assert "node0: --nproc-per-node gpu, but no GPU is visible here" in err, "the hosts count, not the desk"


# ---- they fail together


def test_one_cause_told_once(site: Site, tmp_path: Path) -> None:
    """On the first host; on the second one, with another exit code, see SLURM below."""
    code, out, err = site.run(tmp_path, "-H", "node0:2,node1:1", "train.py", "raise", "0")
    assert code == 1, err
    assert "ranks 1, 2 fell with it" in err
    check_cause(err, "rank 0 of 3, host node0, pid")
    assert out.count("place") == 3
    await_nothing(site)


def check_cause(err: str, place: str) -> None:
    rank, host = re.findall(r"rank (\d) of \d, host (\w+), pid", place)[0]
    assert err.count(f"phalanx: rank {rank} failed: ") == 1
    assert err.count("failed: ") == 1
    assert place in err
    log = re.findall(rf"output: {host}:(\S+)$", err)
    assert log, "the block is the last, and says where the log is"
    assert "place" in Path(log[0]).read_text()


def stay(site: Site, place: Path, *flags: str) -> subprocess.Popen[str]:
    process = site.start(place, "-H", "node0,node1", *flags, "train.py", "stay")
    await_lines(process, "place", 2)
    return process


def test_a_hang_told_once(site: Site, tmp_path: Path) -> None:
    flags = ("-H", "node0,node1", "--stall-after", "1", "--on-stall", "kill")
    code, _, err = site.run(tmp_path, *flags, "train.py", "sleep", "1")
    assert code == 1
    assert len(re.findall(r"^phalanx: no rank has made progress", err, re.MULTILINE)) == 1, err
    assert len(re.findall(r"^  rank 1 is missing: it sleeps at train.py:\d+: time.sleep", err, re.MULTILINE)) == 1
    assert len(re.findall(r"^  rank 1 on node1 \(pid ", err, re.MULTILINE)) == 1
    assert len(re.findall(r"^phalanx: a hang: rank 1 sleeps", err, re.MULTILINE)) == 1


def test_a_second_ctrl_c(site: Site, tmp_path: Path) -> None:
    """Ranks that do not listen are killed, everywhere, long before the timeout."""
    (tmp_path / "deaf.py").write_text(
        "import signal, time\nfor number in (2, 15): signal.signal(number, lambda *_: print('deaf', flush=True))\n"
        "print('place', flush=True)\nwhile True: time.sleep(0.1)\n"
    )
    process = site.start(tmp_path, "-H", "node0,node1", "--shutdown-timeout", "60", "deaf.py")
    await_lines(process, "place", 2)
    process.send_signal(signal.SIGINT)
    await_lines(process, "deaf", 2)
    process.send_signal(signal.SIGINT)
    code, _, err = end(process, 20)
    assert code == 130
    assert err.count("SIGINT: stopping the ranks, 60 s at most") == 1
    await_nothing(site)


def test_the_conductor_is_killed(site: Site, tmp_path: Path) -> None:
    process = stay(site, tmp_path)
    process.kill()
    process.communicate(timeout=20)
    await_nothing(site, 15)


def test_ssh_is_killed(site: Site, tmp_path: Path) -> None:
    process = stay(site, tmp_path)
    (ssh,) = processes(site.desk, "node1 exec ")
    os.kill(ssh, signal.SIGKILL)
    code, _, err = end(process, 30)
    assert code == 1
    assert err.count("phalanx: ") - err.count("phalanx: the backend") == 2, err
    assert "phalanx: the connection to node1 was lost: ssh ended with SIGKILL; all hosts are stopped\n" in err
    await_nothing(site, 15)


@pytest.mark.parametrize("who", [0, 1])
def test_an_agent_is_killed(who: int, site: Site, tmp_path: Path) -> None:
    process = stay(site, tmp_path)
    (agent,) = processes(site.nodes[who], "phalanx.launch.command.remote")
    os.kill(agent, signal.SIGKILL)
    code, _, err = end(process, 30)
    assert code == 1
    # Whoever notices first: the conductor, or the agents of the other nodes.
    told = re.findall(rf"phalanx: (the agent on node{who} was killed|node {who} \(host node{who}, .*\) is lost: )", err)
    assert len(told) == 1, err
    await_nothing(site)


def test_the_desk_loses_its_link(site: Site, tmp_path: Path) -> None:
    """The hosts still have each other, and nobody to end them: they notice that by themselves."""
    process = stay(site, tmp_path)
    site.nodes.cut(2)
    try:
        code, _, err = end(process, 60)
        assert code == 1
        lost = re.findall(r"phalanx: the connection to node[01] was lost: Timeout, server node[01] not responding", err)
        assert len(lost) == 1, err
        await_that(lambda: not any(processes(node, "phalanx.launch") for node in site.nodes[:2]), "they notice", 40)
    finally:
        site.nodes.restore(2)
    await_that(lambda: not any(processes(node, "sshd: root") for node in site.nodes[:2]), "their sessions end", 40)
