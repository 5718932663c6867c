"""Virtual nodes: they are machines of their own, the links between them break as asked, and nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx.testing import Node, VirtualNodes, virtual_nodes
from tests.conftest import REPOSITORY, marked_processes

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="virtual nodes need root")

BARE = [sys.executable, "-I", "-S", "-c"]  # starts in ten milliseconds

# Answers every connection with its host name, and then with whatever it is sent.
ECHO = """
import socket, threading

def serve(connection):
    connection.sendall(socket.gethostname().encode())
    while received := connection.recv(1 << 16):
        connection.sendall(received)

listener = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=[listener.accept()[0]]).start()
"""

# Who answers at each of the addresses, or what became of it.
ASK = """
import socket, sys
timeout, *addresses = sys.argv[1:]
for address in addresses:
    try:
        with socket.create_connection((address, 5000), timeout=float(timeout)) as connection:
            print(connection.recv(100).decode())
    except OSError as error:
        print(type(error).__name__)
"""

# For each round that it is asked about: tells its name to everybody, once, and prints whom it has heard in that round.
GOSSIP = """
import select, socket, sys
mine = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
mine.bind(("", 5001))
print("ready", flush=True)
heard, told = set(), set()
while round := sys.stdin.readline().strip():
    if round not in told:
        told.add(round)
        for address in sys.argv[1:]:
            mine.sendto(f"{round} {socket.gethostname()}".encode(), (address, 5001))
    while select.select([mine], [], [], 0)[0]:
        heard.add(tuple(mine.recv(100).decode().split()))
    print(*sorted(name[4:] for number, name in heard if number == round), flush=True)
"""


@contextlib.contextmanager
def running(node: Node, code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program that says `ready` and is killed at the end."""
    with node.start([*BARE, code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout
            assert program.stdout.readline() == "ready\n"
            yield program
        finally:
            program.kill()


def go_on(program: subprocess.Popen[str], word: str = "") -> None:
    assert program.stdin
    program.stdin.write(f"{word}\n")
    program.stdin.flush()


def ask(node: Node, *others: Node, timeout: float = 10.0) -> list[str]:
    return node.run([*BARE, ASK, str(timeout), *(other.address for other in others)], check=True).stdout.split()


class Gossip:
    """Who hears whom, over datagrams: unlike a connection they need one direction only."""

    def __init__(self, nodes: VirtualNodes, stack: contextlib.ExitStack) -> None:
        addresses = [node.address for node in nodes]
        self._round = 0
        self._programs = [stack.enter_context(running(node, GOSSIP, *addresses)) for node in nodes]

    def is_heard(self, *expected: str) -> bool:
        """Whether each node hears those, itself included, and nobody else."""
        self._round += 1
        if not eventually(lambda: self._heard() == list(expected)):
            print(f"expected {expected}, heard {self._heard()}")
            return False
        time.sleep(0.05)  # for what should not come
        return self._heard() == list(expected)

    def _heard(self) -> list[str]:
        for program in self._programs:
            go_on(program, str(self._round))
        return [program.stdout.readline().strip() for program in self._programs if program.stdout]


def traces() -> tuple[list[str], str]:
    """What a network namespace or a mount would leave on the machine itself."""
    return sorted(os.listdir("/sys/class/net")), Path("/proc/self/mountinfo").read_text()


def eventually(holds: Callable[[], bool], limit: float = 5.0) -> bool:
    deadline = time.monotonic() + limit
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_they_are_machines_of_their_own() -> None:
    look = """
import os, socket, sys
print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), os.getpid() < 100)
print(*sorted(os.listdir("/sys/class/net")), *os.listdir("/dev/shm"), os.readlink("/proc/self/ns/pid"), os.getcwd())
"""
    with virtual_nodes(3) as nodes:
        assert [(node.name, node.address) for node in nodes] == [(f"node{i}", f"10.77.0.{i + 1}") for i in range(3)]
        outputs = [node.run([*BARE, look], check=True).stdout.splitlines() for node in nodes]
        assert [first for first, _ in outputs] == [f"node{i} 10.77.0.{i + 1} True" for i in range(3)]
        namespaces = set()
        for _, second in outputs:
            *devices, pid_namespace, cwd = second.split()
            assert (devices, cwd) == (["eth0", "lo"], os.getcwd())
            namespaces.add(pid_namespace)
        assert len({*namespaces, os.readlink("/proc/self/ns/pid")}) == 4
        assert socket.gethostname() != "node0"
        assert "node0" not in Path("/etc/hosts").read_text()


def test_ranks_can_tell_the_nodes_apart() -> None:
    with virtual_nodes(2) as nodes:
        code = [sys.executable, "-c", "from phalanx.store import join; print(join._machine())"]
        assert len({node.run(code, check=True, cwd=REPOSITORY).stdout for node in nodes}) == 2


def test_a_name_that_leads_to_the_loopback() -> None:
    code = "import socket; print(*(socket.gethostbyname(f'node{i}') for i in (0, 1)))"
    with virtual_nodes(2, loopback_names=True) as nodes:
        assert nodes[0].run([*BARE, code]).stdout.split() == ["127.0.1.1", "10.77.0.2"]
        assert nodes[1].run([*BARE, code]).stdout.split() == ["10.77.0.1", "127.0.1.1"]


def test_they_reach_each_other_and_nothing_else() -> None:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("", 0)))
        nodes = stack.enter_context(virtual_nodes(3))
        for node in nodes:
            stack.enter_context(running(node, ECHO))
        for node in nodes:
            assert ask(node, *nodes) == ["node0", "node1", "node2"]
        ours = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}))"
        assert "ConnectionRefusedError" in nodes[0].run([*BARE, ours]).stderr
        outside = "import socket; socket.create_connection(('192.0.2.1', 80))"
        assert "Network is unreachable" in nodes[0].run([*BARE, outside]).stderr


def test_two_networks_at_once() -> None:
    with virtual_nodes(1) as first, virtual_nodes(2) as second, running(second[0], ECHO):
        assert ask(second[1], second[0]) == ["node0"]
        assert ask(first[0], first[0]) == ["ConnectionRefusedError"]


def test_cut_and_restore() -> None:
    with virtual_nodes(3) as nodes, running(nodes[1], ECHO), running(nodes[2], ECHO):
        # Whoever has to look for a neighbour shall give up at once: nobody may have to.
        quick_to_give_up = "cd /proc/sys/net/ipv4/neigh/eth0; echo 1 > mcast_solicit; echo 10 > retrans_time_ms"
        for node in nodes:
            node.run(["sh", "-c", quick_to_give_up], check=True)
        nodes.cut(1)
        assert ask(nodes[0], nodes[1], timeout=0.3) == ["TimeoutError"]
        assert ask(nodes[1], nodes[2], timeout=0.3) == ["TimeoutError"]
        assert ask(nodes[0], nodes[2]) == ["node2"]
        assert ask(nodes[1], nodes[1]) == ["node1"]
        nodes.cut(1)
        nodes.restore(1)
        assert ask(nodes[0], nodes[1], nodes[2]) == ["node1", "node2"]


def test_a_connection_survives_a_short_cut() -> None:
    client = """
import socket, sys
connection = socket.create_connection(("node1", 5000))
connection.recv(100)
print("ready", flush=True)
sys.stdin.readline()
connection.sendall(b"still there")
print(connection.recv(100).decode())
"""
    with virtual_nodes(2) as nodes, running(nodes[1], ECHO), running(nodes[0], client) as program:
        nodes.cut(1)
        assert program.stdout
        go_on(program)
        time.sleep(0.3)
        assert program.poll() is None
        nodes.restore(1)
        assert program.stdout.readline() == "still there\n"


def test_one_way_cuts() -> None:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(virtual_nodes(3))
        gossip = Gossip(nodes, stack)
        assert gossip.is_heard(*["0 1 2"] * 3)
        nodes.cut(1, "out")
        assert gossip.is_heard("0 2", "0 1 2", "0 2")
        nodes.restore(1)
        nodes.cut(1, "in")
        assert gossip.is_heard("0 1 2", "1", "0 1 2")
        nodes.cut(1, "out")
        assert gossip.is_heard("0 2", "1", "0 2")
        nodes.restore(1)
        assert gossip.is_heard(*["0 1 2"] * 3)
        with pytest.raises(UsageError, match="no direction 'up'"):
            nodes.cut(0, "up")  # pyright: ignore[reportArgumentType]


def test_partition_and_heal() -> None:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(virtual_nodes(4, bandwidth="1gbit"))
        gossip = Gossip(nodes, stack)
        nodes.partition([0], [1, 2])
        assert gossip.is_heard("0", "1 2", "1 2", "3")
        nodes.partition([0, 2])
        assert gossip.is_heard("0 2", "1 3", "0 2", "1 3")
        nodes.cut(3)
        nodes.heal()
        assert gossip.is_heard("0 1 2", "0 1 2", "0 1 2", "3")
        nodes.restore(3)
        assert gossip.is_heard(*["0 1 2 3"] * 4)
        with pytest.raises(UsageError, match="one group only"):
            nodes.partition([0, 1], [1])


def test_bandwidth() -> None:
    send = """
import socket, time
with socket.create_connection(("node1", 5000)) as connection:
    connection.recv(100)
    began = time.monotonic()
    connection.sendall(bytes(2_000_000))
    print(connection.recv(1) and time.monotonic() - began)
"""
    receive = """
import socket
listener = socket.create_server(("", 5000))
print("ready", flush=True)
while True:
    with listener.accept()[0] as connection:
        connection.sendall(b"hello")
        left = 2_000_000
        while left:
            left -= len(connection.recv(1 << 16))
        connection.sendall(b".")
"""
    with virtual_nodes(2, bandwidth="20mbit") as nodes, running(nodes[1], receive):

        def seconds() -> float:
            return float(nodes[0].run([*BARE, send], check=True).stdout)

        assert seconds() > 0.6
        nodes.cut(1)
        nodes.restore(1)  # the bandwidth is the same as before
        assert seconds() > 0.6
        nodes.shape(None)
        assert min(seconds() for _ in range(3)) < 0.5
        for wrong in ("20", "fast", "0mbit", "-1mbit"):
            with pytest.raises(UsageError, match="is not a bandwidth"):
                nodes.shape(wrong)


def test_stop_is_a_power_loss() -> None:
    client = """
import socket
connection = socket.create_connection(("node1", 5000))
connection.recv(100)
connection.settimeout(0.5)
print("ready", flush=True)
try:
    print("received", connection.recv(100))
except TimeoutError:
    print("nothing")
"""
    family = """
import os, time
if os.fork() == 0:
    os.setsid()
    print("ready", flush=True)
time.sleep(1000)
"""
    with virtual_nodes(3) as nodes:
        before = marked_processes()
        with running(nodes[1], ECHO) as echo, running(nodes[1], family) as parent, running(nodes[0], client) as program:
            assert len(marked_processes() - before) == 4
            nodes.stop(1)
            assert (echo.returncode, parent.returncode) == (-signal.SIGKILL, -signal.SIGKILL)
            assert marked_processes() - before == {program.pid}
            assert program.stdout
            assert program.stdout.readline() == "nothing\n"
        assert ask(nodes[0], nodes[1], timeout=0.3) == ["TimeoutError"]
        for use in (lambda: nodes[1].run(["true"]), lambda: nodes.cut(1), lambda: nodes.stop(1)):
            with pytest.raises(UsageError, match="has been stopped"):
                use()
        nodes.shape("100mbit")
        nodes.partition([0], [2])
        nodes.heal()
        assert ask(nodes[0], nodes[2]) == ["ConnectionRefusedError"]


def test_programs_end_as_they_do_elsewhere(tmp_path: Path) -> None:
    with virtual_nodes(1) as nodes:
        node = nodes[0]
        done = node.run(
            ["sh", "-c", "cat; echo $WORD >&2; pwd; exit 7"], input="in\n", env={"WORD": "err"}, cwd=tmp_path
        )
        assert (done.returncode, done.stdout, done.stderr) == (7, f"in\n{tmp_path}\n", "err\n")
        with pytest.raises(subprocess.CalledProcessError):
            node.run(["false"], check=True)
        missing = node.run(["no-such-program"])
        assert missing.returncode == 127
        assert "no-such-program could not be started on node0" in missing.stderr
        # A pipe that is closed ends it, as it does a program that a shell starts: Python has not changed that for it.
        assert node.run(["sh", "-c", "yes | head -1; kill -PIPE $$"]).returncode == -signal.SIGPIPE
        with pytest.raises(subprocess.TimeoutExpired):
            node.run(["sh", "-c", "sleep 1000; true"], timeout=0.1)


def test_signals_reach_the_program() -> None:
    trap = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"told to stop\\n"), sys.exit(9)))
print("ready", flush=True)
time.sleep(1000)
"""
    with virtual_nodes(1) as nodes:
        with running(nodes[0], trap) as program:
            program.send_signal(signal.SIGSTOP)
            assert eventually(
                lambda: Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            )
            program.send_signal(signal.SIGCONT)
            program.terminate()
            assert program.stdout
            assert program.stdout.readline() == "told to stop\n"
            assert program.wait(5) == 9
        with running(nodes[0], trap) as program:
            program.kill()
            assert program.wait(5) == -signal.SIGKILL
        # This process has stayed where it was: its children are born here.
        assert subprocess.run(["readlink", "/proc/self/ns/pid"], capture_output=True, text=True).stdout.strip() == (
            os.readlink("/proc/self/ns/pid")
        )


def test_threads_may_use_them() -> None:
    """A thread that starts a program on a node changes where its children are born, and nobody else's."""
    look = ["readlink", "/proc/self/ns/pid"]
    with virtual_nodes(3) as nodes, ThreadPoolExecutor(4) as pool:
        on_nodes = [pool.submit(nodes[i % 3].run, look) for i in range(12)]
        here = [pool.submit(subprocess.run, look, capture_output=True, text=True) for _ in range(12)]
        found = [each.result().stdout for each in on_nodes]
        assert len(set(found)) == 3
        assert {each.result().stdout for each in here} == {os.readlink("/proc/self/ns/pid") + "\n"}


def test_nothing_is_left() -> None:
    before, processes = traces(), marked_processes()
    with virtual_nodes(2) as nodes:
        program = nodes[0].start(["sleep", "1000"])
        assert traces() == before
    assert program.returncode == -signal.SIGKILL
    assert (traces(), marked_processes()) == (before, processes)
    with contextlib.suppress(ZeroDivisionError), virtual_nodes(2, bandwidth="1gbit") as nodes:
        program = nodes[1].start(["sleep", "1000"])
        raise ZeroDivisionError
    assert program.returncode == -signal.SIGKILL
    assert (traces(), marked_processes()) == (before, processes)


def test_their_mounts_stay_with_them() -> None:
    """Also where mounts are shared by default, as systemd has it."""
    code = """
from pathlib import Path
from phalanx.testing import namespaces, virtual_nodes

namespaces._call("unshare", namespaces.MOUNT)
namespaces._mount("none", "/", None, 0x4000 | 0x100000)  # MS_REC | MS_SHARED
mounts = Path("/proc/self/mountinfo")
before = mounts.read_text()
with virtual_nodes(1):
    print(mounts.read_text() == before)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_a_set_up_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tc").write_text("#!/bin/sh\necho 'Specified qdisc kind is unknown.' >&2; exit 2\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before, processes = traces(), marked_processes()
    with pytest.raises(RuntimeError, match="tc failed on node 0: Specified qdisc"), virtual_nodes(2, "1gbit"):
        pass
    assert (traces(), marked_processes()) == (before, processes)


MAKER = """
import os, signal, sys, time
from phalanx.testing import virtual_nodes

for delay in map(float, sys.argv[1:]):
    maker = os.fork()  # cheaper than to import everything again
    if maker == 0:
        with virtual_nodes(3, bandwidth="1gbit") as nodes:
            for node in nodes:
                node.start(["sh", "-c", "sleep 1000 & sleep 1000"])
            os.write(1, b"made\\n")  # in one piece: an unbuffered print can be killed before its end of line
            time.sleep(1000)
    if delay < 0:
        sys.stdin.readline()
    else:
        time.sleep(delay)
    os.kill(maker, {signal})
    os.waitpid(maker, 0)
    print("killed", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("sent", ["SIGKILL", "SIGINT", "SIGTERM"])
def test_nothing_is_left_when_the_maker_is_killed(sent: str) -> None:
    """At many moments of set-up; the last time, when it is done and programs run on the nodes."""
    before, processes = traces(), marked_processes()
    moments = (
        [0.0, 0.01, 0.02, 0.03, 0.045, 0.06, 0.075, 0.09, 0.11, 0.13, 0.16, 0.2] if sent == "SIGKILL" else [0.05, 0.1]
    )
    arguments = [*map(str, moments), "-1"]
    code = MAKER.replace("{signal}", f"signal.{sent}")
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as maker:
        assert maker.stdout
        for _ in moments:
            assert "killed\n" in iter(maker.stdout.readline, "")
            assert eventually(lambda: marked_processes() - processes == {maker.pid})
            go_on(maker)
        assert "made\n" in iter(maker.stdout.readline, "")
        assert eventually(
            lambda: len(marked_processes() - processes) >= 2 + 5 + 6
        )  # gate, warden, three holders, two programs a node
        assert traces() == before
        go_on(maker)
        assert maker.stdout.readline() == "killed\n"
        assert eventually(lambda: marked_processes() - processes == {maker.pid})
        go_on(maker)
    assert traces() == before


def test_a_forked_child_does_not_keep_them() -> None:
    """It has copies of all that its parent had open, and outlives it."""
    code = """
import os, time
from phalanx.testing import virtual_nodes

with virtual_nodes(1) as nodes:
    nodes[0].start(["sleep", "1000"])
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(1000)
"""
    processes = marked_processes()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout
        bystander = int(maker.stdout.readline())
        try:
            maker.kill()
            assert eventually(lambda: marked_processes() - processes == {bystander})
        finally:
            os.kill(bystander, signal.SIGKILL)


def test_torch_between_two_nodes() -> None:
    code = textwrap.dedent("""
        import sys, torch, torch.distributed as dist
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="tcp://node0:29500", rank=rank, world_size=2)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        print(total.item())
        dist.destroy_process_group()
    """)
    with virtual_nodes(2) as nodes:
        ranks = [
            node.start([sys.executable, "-c", code, str(i)], env={"GLOO_SOCKET_IFNAME": "eth0"}, stdout=subprocess.PIPE)
            for i, node in enumerate(nodes)
        ]
        for rank in ranks:
            assert rank.communicate(timeout=60)[0] == "3.0\n"


def test_phalanx_run_on_a_node(script: Callable[..., str], tmp_path: Path) -> None:
    script("""
        import socket, torch, torch.distributed as dist, phalanx as px
        with px.init() as world:
            total = torch.tensor([world.rank + 1.0])
            dist.all_reduce(total)
            px.print(total.item(), socket.gethostname())
    """)
    with virtual_nodes(2) as nodes:
        done = nodes[1].run([sys.executable, "-m", "phalanx", "run", "--nproc-per-node", "2", "train.py"], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "3.0 node1" in done.stdout


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(why: str, n: int = 2) -> None:
        with pytest.raises(UsageError, match=why), virtual_nodes(n):
            pass

    refused("0 virtual nodes cannot be made: 1 to 100 can", 0)
    refused("101 virtual nodes", 101)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        refused("need the command ip, which was not found; install iproute2")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused("need root, and this process runs as user 1000")
