"""A second user of the machine against a run of the first: no code of theirs runs, no file of the first is written.

Needs root, to be two other users.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phalanx import events
from phalanx.diagnose import inspect_command, report_command
from phalanx.errors import ForeignData, UsageError
from phalanx.shm.node import p2p, segment
from phalanx.status import layout
from phalanx.status.page import StatusPage
from phalanx.store.join import Claim
from tests.conftest import WITHOUT_TORCH, Runner, by_rank, free_port
from tests.contact.conftest import FULL

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can act as two other users, with util-linux"
)

VICTIM, ATTACKER = 12001, 65534
_ATTACKER = Path(__file__).with_name("attacker.py")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user can enter; pytest's own are root's alone."""
    directory = Path(tempfile.mkdtemp(prefix="phalanx-attack-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def attack() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the attacker, as the other user; ends it after the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: object) -> subprocess.Popen[str]:
            command = as_user(ATTACKER, sys.executable, "-I", "-S", str(_ATTACKER), *map(str, arguments))
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(end, process)
            return process

        yield start


def end(process: subprocess.Popen[str]) -> str:
    """What it has said."""
    return process.communicate()[0] if process.stdin and not process.stdin.closed else ""


def as_user(uid: int, *command: str) -> list[str]:
    """The command, as this user. An interpreter in root's home is shown to it by a mount that only it sees."""
    become = f'exec setpriv --reuid {uid} --regid {uid} --clear-groups -- "$@"'
    interpreter = Path(sys.executable).resolve()
    hidden = next((path for path in reversed(interpreter.parents) if not path.stat().st_mode & 0o001), None)
    if hidden is None:
        return ["sh", "-c", become, "sh", *command]
    inside = hidden / interpreter.relative_to(hidden).parts[0]
    show = (
        f"exec 3<{inside} && mount -t tmpfs -o mode=755 none {hidden} && mkdir {inside} && "
        f"mount --no-canonicalize --bind /proc/self/fd/3 {inside} && exec 3<&- && {become}"
    )
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", show, "sh", *command]


def owned(directory: Path, uid: int, mode: int = 0o755) -> Path:
    directory.mkdir()
    os.chown(directory, uid, uid)
    directory.chmod(mode)
    return directory


def start_as(uid: int, cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        as_user(uid, sys.executable, "-m", "phalanx", "run", *arguments),
        cwd=cwd,
        env={**os.environ, "HOME": str(cwd)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(cwd: Path, uid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = start_as(uid, cwd, *arguments)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def overwritten(attacker: subprocess.Popen[str]) -> str:
    """What it has done to a store, for the table."""
    keys = {line for line in end(attacker).splitlines() if line.startswith("overwritten")}
    assert keys
    return f"{len(keys)} keys overwritten, no code ran"


def test_a_pickle_in_the_rendezvous(place: Path, attack, record_property) -> None:
    """A second user writes pickles into the store where nodes meet.

    torch's dynamic rendezvous would have unpickled them.
    """
    home, marker = owned(place / "home", VICTIM), owned(place / "open", ATTACKER, 0o777) / "marker"
    (home / "train.py").write_text("print('trained')")
    port, host = free_port(), own_address()
    attacker = attack("store", host, port, marker, "torch.rendezvous.phalanx")
    flags = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", "x", "--rdzv-timeout", "20")
    done = run(home, VICTIM, *WITHOUT_TORCH, "--nnodes", "2:3", *flags, "train.py")
    record_property("result", overwritten(attacker))
    assert not marker.exists(), f"code ran as user {marker.read_text()}"
    assert done.returncode == 1
    assert "the store where the nodes meet holds what phalanx did not write there" in done.stderr
    assert "Traceback" not in done.stderr


STEPPING = """
import os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print("stepping", flush=True)
    time.sleep(float(sys.argv[1]))
    sys.exit(3 if os.environ["RANK"] == "1" and len(sys.argv) > 2 else 0)
print("trained", "PHALANX_SECRET" in os.environ, flush=True)
"""


def test_messages_between_nodes(place: Path, attack, record_property) -> None:
    """A second user writes whatever it likes into the store where the nodes of a run meet, and to their connections.

    It does so from the start of a run whose rank 1 fails once, and after the start of one with torch's rendezvous,
    whose own state it can damage. Both get to their ends as if nobody was there.
    """
    home, host = owned(place / "home", VICTIM), own_address()
    (home / "train.py").write_text(STEPPING)
    (home / "secret").write_text("correct horse battery staple")
    (home / "secret").chmod(0o600)
    os.chown(home / "secret", VICTIM, VICTIM)
    ports = [free_port(), free_port()]
    seconds = "13" if FULL else "2"  # a node may be silent for 10
    attackers = [attack("nodes", host, ports[0])]
    fixed = ["--nnodes", "2", "--master-addr", host, "--master-port", str(ports[0]), "--max-restarts", "1"]
    elastic = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{ports[1]}"]
    flags = [*WITHOUT_TORCH, "--secret-file", "secret", "--rdzv-timeout", "60"]
    agents = [
        start_as(VICTIM, home, *flags, *fixed, "--node-rank", "0", "train.py", seconds, "fail"),
        start_as(VICTIM, home, *flags, *fixed, "--node-rank", "1", "train.py", seconds, "fail"),
        start_as(VICTIM, home, *flags, *elastic, "train.py", seconds),
        start_as(VICTIM, home, *flags, *elastic, "train.py", seconds),
    ]
    for agent in agents[2:]:
        assert agent.stdout is not None
        assert "stepping" in agent.stdout.readline(), agent.communicate()
    attackers.append(attack("nodes", host, ports[1]))
    outputs = [agent.communicate(timeout=120) for agent in agents]
    told = [end(attacker) for attacker in attackers]
    assert [agent.returncode for agent in agents] == [0, 0, 0, 0], outputs
    for out, err in outputs[:2]:
        assert "trained False" in out
        assert err.count("starting again, attempt 2 of 2") == 1
        assert "rank 1 failed: sys.exit(3) at train.py:6; starting again" in err
    for _, err in outputs:
        assert "Traceback" not in err
        assert "forged" not in err
        assert " is lost" not in err
    assert "overwritten /phalanx/hub" in told[0]
    assert "forged" in told[1]
    assert "overwritten /torch.rendezvous.phalanx.none" in told[1]
    noted = [path.read_text().count('"ignored"') for path in home.glob("runs/2*/agent.events.jsonl")]
    assert len(noted) == 4
    assert 0 < sum(noted) < 100, "a line for each kind, not for each message"
    keys = {line for text in told for line in text.splitlines() if line.startswith("overwritten")}
    record_property("result", f"{len(keys)} keys overwritten, no message was followed")


def own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel only chooses an address of this machine
        return probe.getsockname()[0]


TRAINING = """
import time, torch, phalanx as px
with px.init() as world:
    model = torch.nn.Linear(4, 2)
    state = px.State(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with px.Checkpointer("checkpoints") as keeper:
        for step in range(3):
            time.sleep(0.3 * world.rank)  # what rank 0 says of its share stays in the store for so long
            state.step = step
            keeper.save(state)
            keeper.wait()
"""


SHARES = r"checkpoint-\d+/(?!turn|.*(outcome|count))"


@pytest.mark.parametrize("pattern", [SHARES, "claim|verdict|first|segment"], ids=["checkpoints", "joining"])
def test_pickles_in_the_store_of_the_ranks(pattern: str, place: Path, attack, record_property) -> None:
    """A second user writes pickles into the store of the ranks.

    It is on loopback, where every user of the machine can write to it. They may end the run, and no more.
    """
    home, marker = owned(place / "home", VICTIM), owned(place / "open", ATTACKER, 0o777) / "marker"
    (home / "train.py").write_text(TRAINING)
    port = free_port()
    attacker = attack("store", "127.0.0.1", port, marker, pattern)
    done = run(home, VICTIM, "--nproc-per-node", "2", "--master-port", str(port), "train.py")
    record_property("result", overwritten(attacker))
    assert not marker.exists(), f"code ran as user {marker.read_text()}"
    assert "Traceback" not in done.stderr
    if pattern == SHARES:  # a save may have failed, or not
        assert done.returncode == 0 or "failed: phalanx.errors." in done.stderr
    else:
        assert done.returncode == 1
        assert "holds what phalanx did not write there" in done.stderr


def test_numbers_that_lead_to_another_users_process(place: Path, attack) -> None:
    """A second user's pid, descriptor and socket address in the place of a rank's, before root.

    Root would be let in everywhere.
    """
    precious = place / "precious"
    precious.write_text("root's own")
    precious.chmod(0o644)
    attacker = attack("hold", precious)
    assert attacker.stdout is not None
    pid, fd, address = attacker.stdout.readline().split()
    claim = Claim(0, 2, "here", int(pid), 0, "")
    with pytest.raises(ForeignData, match="is not the memory of the group"):
        segment._open(claim, int(fd))
    with socket.socket(socket.AF_UNIX) as line:
        line.connect("\0" + address)
        assert p2p._peer_pid(line) is None


def test_a_directory_of_runs_that_is_not_ours(place: Path) -> None:
    """`--log-dir` in a second user's directory, by root and by another user."""
    base = owned(place / "runs", ATTACKER, 0o777)
    (place / "train.py").write_text("print('trained')")
    for uid in (0, VICTIM):
        done = run(place, uid, *WITHOUT_TORCH, "--log-dir", str(base), "train.py")
        assert done.returncode == 2, done.stderr
        assert f"it belongs to another user (uid {ATTACKER})" in done.stderr
        assert "--log-dir" in done.stderr
    assert not list(base.iterdir())


@pytest.mark.parametrize("uid", [0, VICTIM], ids=["of root", "of another user"])
def test_a_run_directory_that_becomes_a_link(uid: int, place: Path, attack) -> None:
    """A second user swaps a new run directory for a link.

    Its base has the sticky bit, which does not bind the base's own owner.
    """
    base = owned(place / "runs", ATTACKER, 0o1777)
    precious = owned(place / "precious", uid, 0o700)
    (place / "train.py").write_text("import time; print('trained'); time.sleep(0.5)")
    attacker = attack("swap", base, precious)
    done = run(place, uid, *WITHOUT_TORCH, "--nproc-per-node", "2", "--log-dir", str(base), "train.py")
    assert "swapped" in end(attacker)
    assert not list(precious.iterdir()), done.stderr
    assert "Traceback" not in done.stderr


def test_reading_the_directory_of_another_user(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`phalanx report` and `inspect` by root in a second user's run directory.

    Nothing is waited for, nobody is asked or signalled, and what is wrong is one sentence.
    """
    base = owned(place / "run", ATTACKER)
    run_file, page = base / events.RUN_FILE, layout.status_path(base, 0)
    for content in ("[]", "{}", '{"host": 1}'):
        run_file.write_text(content)
        for main in (report_command.main, lambda argv: inspect_command.main(argv, no_stacks)):
            with pytest.raises(UsageError, match=r"cannot be read: |has written what it does"):
                main([str(base)])
    run_file.write_text(json.dumps({"host": socket.gethostname(), "started": time.time()}))
    os.mkfifo(page)
    with pytest.raises(UsageError, match=r"no rank of .* has written"):
        inspect_command.main([str(base)], no_stacks)
    page.unlink()
    os.chown(base, 0, 0)
    StatusPage(page)  # of this process, which is root's
    asked = []
    for owner in (ATTACKER, 0):
        os.chown(page, owner, owner)
        inspect_command.main([str(base), "--stacks", "--seconds", "0"], lambda pids, _: asked.append(dict(pids)) or {})
    assert asked == [{}, {0: os.getpid()}]
    capsys.readouterr()


def no_stacks(pids: object, directory: object) -> dict:
    raise AssertionError("nobody is asked")


def test_what_ranks_print_is_no_message(phalanx: Runner, script, tmp_path: Path) -> None:
    """A rank prints what looks like an agent's messages, as the same user.

    One that printed an agent's mark ended the run, and could say that it had ended well.
    """
    text = r"""
    import sys
    for words in ("[]", '{"ended": 0}', '{"refused": "x"}', '{"say": "y", "topic": "verdict"}', "0" * 32 + "{}"):
        print("\x1ephalanx\x1e" + words, file=sys.stderr, flush=True)
    sys.exit(3)
    """
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')  # to a host that is this machine
    ssh.chmod(0o755)
    outcome = phalanx(
        "run", *WITHOUT_TORCH, "-H", "elsewhere", "--ssh", str(ssh), "--nproc-per-node", "2", script(text)
    )
    assert outcome.code == 3
    assert '\x1ephalanx\x1e{"ended": 0}' in outcome.err
    assert "Traceback" not in outcome.err


def test_the_secret_is_nowhere_to_be_seen(phalanx: Runner, script) -> None:
    """Search for the secret in command lines, environments and programs that a rank starts, as the same user."""
    text = """
    import glob, subprocess, sys
    from pathlib import Path
    from phalanx import secret
    own = secret.text()
    seen = [path for kind in ("cmdline", "environ") for path in glob.glob(f"/proc/[0-9]*/{kind}")]
    found = []
    for path in seen:
        try:
            found += [path] * (own.encode() in Path(path).read_bytes())
        except OSError:
            pass
    program = [sys.executable, "-c", "from phalanx import secret; print(secret.text())"]
    print(len(own), hash(own), found, subprocess.run(program, capture_output=True, text=True).stdout)
    """
    env = {"PYTHONHASHSEED": "0"}
    lines = by_rank(phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "2", script(text), env=env))
    assert lines[0] == lines[1]
    assert re.fullmatch(r"64 -?\d+ \[\] None", lines[0][0])
