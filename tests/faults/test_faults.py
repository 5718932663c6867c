"""What happens when something breaks: the text, the time, and that nothing is left (the leak police sees to that)."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import WITHOUT_TORCH, Runner, marked_processes, start, told

HEADER = """
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()

def step():
    dist.all_reduce(torch.ones(4))

step()
"""

WITHOUT_TORCH_HEADER = """
import os, sys, time
rank = int(os.environ["RANK"])
step = lambda: time.sleep(60)
"""


def block_of(outcome) -> list[str]:
    """The end of the run, checked for what every such block must be."""
    block = outcome.complaint
    assert 1 < len(block) <= 15, outcome.err
    assert "Traceback" not in outcome.err, "tracebacks belong into the logs"
    assert len(outcome.told) - len(block) <= 1, "beside the block, the line of the start and no more"
    return block


def fault_to_end(tmp_path: Path) -> float:
    """Seconds from the moment that the failing rank wrote down to the end of the run."""
    events = [json.loads(line) for line in (tmp_path / "runs/latest/agent.events.jsonl").read_text().splitlines()]
    return events[-1]["time"] - float((tmp_path / "moment").read_text())


MOMENT = "open('moment', 'w').write(str(time.time()))"


def test_a_rank_raises(phalanx: Runner, script, tmp_path: Path) -> None:
    name = script(
        HEADER
        + f"""
def train(label):
    if rank == 2:
        print("about to look at label", label)
        {MOMENT}
        raise ValueError(f"label {{label}} is not in [0, 10)")
    try:
        step()
    except RuntimeError:
        print("rank", rank, "saw its peer go")  # never held back, whoever is to blame
        raise

train(11)
"""
    )
    outcome = phalanx("run", "--nproc-per-node", "4", name)
    block = block_of(outcome)
    assert outcome.code == 1
    assert block[0] == "phalanx: rank 2 failed: ValueError: label 11 is not in [0, 10)"
    assert re.search(rf"rank 2 of 4, host {socket.gethostname()}, pid \d+, exit code 1", block[1])
    assert '  at train.py:16 in train: raise ValueError(f"label {label} is not in [0, 10)")' in block
    assert "    about to look at label 11" in block
    assert "  ranks 0, 1, 3 fell with it" in block
    assert "rank-2.log" in block[-1]
    assert fault_to_end(tmp_path) <= 1.0
    log = (tmp_path / "runs/latest/rank-2.log").read_text()
    assert log.endswith("ValueError: label 11 is not in [0, 10)\n")
    assert "Traceback (most recent call last)" in log
    report = json.loads((tmp_path / "runs/latest/report.json").read_text())
    assert (report["exit_code"], report["cause"]["rank"], report["victims"]) == (1, 2, [0, 1, 3])
    error = json.loads((tmp_path / "runs/latest/error-2.json").read_text())
    assert error["frames"][-1]["line"] == 16


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (signal.SIGKILL, "killed from outside"),
        (signal.SIGSEGV, "native code touched memory that is not its own"),
        (signal.SIGABRT, "native code gave up"),
    ],
)
def test_a_rank_dies_by_a_signal(number: signal.Signals, meaning: str, phalanx: Runner, script, tmp_path: Path) -> None:
    method, header = ("fork", HEADER) if number == signal.SIGSEGV else ("exec", WITHOUT_TORCH_HEADER)
    name = script(
        header
        + f"""
def crash():
    {MOMENT}
    os.kill(os.getpid(), {int(number)})

if rank == 1:
    crash()
step()
time.sleep(60)
"""
    )
    outcome = phalanx("run", "--start-method", method, "--nproc-per-node", "4", name)
    block = block_of(outcome)
    assert outcome.code == 128 + number
    assert block[0].startswith(f"phalanx: rank 1 failed: {number.name}, {meaning}")
    assert "ranks 0, 2, 3 fell with it" in "".join(block)
    assert not any("phalanx/launch" in line for line in block), block
    if number != signal.SIGKILL:
        line = len(header.splitlines()) + 4
        assert any(f"train.py:{line} in crash: os.kill" in text for text in block), block
    assert fault_to_end(tmp_path) <= 1.0


WITH_LOADERS = """
import torch.distributed as dist
from torch.utils.data import DataLoader
dist.init_process_group("gloo")
loader = iter(DataLoader(range(100000), num_workers=1))
next(loader)
dist.barrier()
print("up", flush=True)
while True:
    next(loader, None)
"""
WITH_CHILDREN = """
import subprocess, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("up", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(("method", "text"), [("fork", WITH_LOADERS), ("exec", WITH_CHILDREN)], ids=["fork", "exec"])
def test_the_agent_is_killed(method: str, text: str, script, tmp_path: Path) -> None:
    """SIGKILL of the agent: no worker and no loader's worker is left after a second."""
    name = script(text)
    agent = start("-m", "phalanx", "run", "--nproc-per-node", "2", "--start-method", method, name, cwd=tmp_path)
    before = processes_when_up(agent)
    deadline = time.monotonic() + 5.0
    while len(before) < 7 and time.monotonic() < deadline:  # a child that is just being executed has no environment
        before = marked_processes() - {os.getpid()}
    assert len(before) >= 7  # agent, zygote, keeper, 2 workers with a child each
    agent.kill()
    agent.communicate()
    check_gone_in_a_second(before)


def check_gone_in_a_second(processes: set[int]) -> None:
    deadline = time.monotonic() + 1.0
    while processes & marked_processes():
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)


def processes_when_up(agent: subprocess.Popen) -> set[int]:
    """All of the run, once both ranks have said so."""
    assert agent.stdout is not None
    for _ in range(2):
        assert "up" in agent.stdout.readline()
    return marked_processes() - {os.getpid()}


def test_agent_and_zygote_are_killed_together(script, tmp_path: Path) -> None:
    """Then the keeper is the one that ends the rest."""
    agent = start("-m", "phalanx", "run", "--nproc-per-node", "2", script(WITH_CHILDREN), cwd=tmp_path)
    before = processes_when_up(agent)
    (zygote,) = psutil.Process(agent.pid).children()
    agent.kill()
    zygote.kill()
    agent.communicate()
    check_gone_in_a_second(before)


@pytest.mark.beside_others
def test_the_zygote_is_killed(script, tmp_path: Path) -> None:
    agent = start("-m", "phalanx", "run", "--nproc-per-node", "2", script(STUBBORN), cwd=tmp_path)
    processes_when_up(agent)
    (zygote,) = psutil.Process(agent.pid).children()
    zygote.kill()
    _, err = agent.communicate(timeout=10)
    assert agent.returncode == 1
    assert f"the process that starts the workers (pid {zygote.pid}) was killed by SIGKILL" in told(err)[1]
    assert len(told(err)) == 2


@pytest.mark.beside_others
def test_a_grandchild_that_stays_behind_is_ended_with_the_run(phalanx: Runner, script) -> None:
    name = script(
        """
        import os, subprocess
        subprocess.Popen(["sleep", "1000"], start_new_session=True)   # holds the output pipes open, too
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "1001"])
        print("done")
        """
    )
    outcome = phalanx("run", *WITHOUT_TORCH, name, timeout=20)
    assert (outcome.code, outcome.out) == (0, "done\n")


INTERRUPT = (
    HEADER
    + """
print("up", flush=True)
if rank == 0:
    dist.recv(torch.ones(1), src=1)   # blocked in C++, where Python cannot act on a signal
while True:
    time.sleep(0.05)
"""
)
CLEANING_UP = (
    HEADER
    + """
try:
    print("up", flush=True)  # inside: the signal may come right after it
    if rank == 0:
        dist.recv(torch.ones(1), src=1)   # blocked in C++, where Python cannot act on a signal
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
    open(f"saved-{rank}", "w").close()
    raise
"""
)


def interrupted(tmp_path: Path, name: str, number: int, *flags: str, times: int = 1) -> tuple[int, list[str], float]:
    agent = start("-m", "phalanx", "run", "--nproc-per-node", "2", *flags, name, cwd=tmp_path)
    assert agent.stdout is not None
    for _ in range(2):
        assert "up" in agent.stdout.readline()
    started = time.monotonic()
    for _ in range(times):
        agent.send_signal(number)
        time.sleep(0.3)
    _, err = agent.communicate(timeout=30)
    return agent.returncode, told(err), time.monotonic() - started


def test_ctrl_c_while_a_rank_is_blocked_and_another_cleans_up(script, tmp_path: Path) -> None:
    """The one gets the time it needs; the other is killed when all time is over."""
    code, lines, seconds = interrupted(tmp_path, script(CLEANING_UP), signal.SIGINT, "--shutdown-timeout", "3")
    assert code == 130
    assert len(lines) <= 5, lines
    assert "SIGINT: stopping the ranks, 3 s at most" in lines[1]
    assert seconds <= 4.0
    assert (tmp_path / "saved-1").exists()


@pytest.mark.beside_others
def test_a_script_that_closes_what_is_not_its_own(phalanx: Runner, script, tmp_path: Path) -> None:
    """As programs do that become daemons. What we would have told goes neither into its files nor to nowhere."""
    name = script(
        """
        import os
        os.closerange(3, 4096)
        files = [open(f"own-{number}", "w") for number in range(60)]  # they get the numbers that are free now
        raise ValueError("told all the same")
        """
    )
    outcome = phalanx("run", *WITHOUT_TORCH, name)
    assert outcome.code == 1
    assert "ValueError: told all the same" in (tmp_path / "runs/latest/rank-0.log").read_text()
    assert {path.read_text() for path in tmp_path.glob("own-*")} == {""}


JUST_FAILED = """
import atexit, os, time

def clean_up():
    print("up", flush=True)
    time.sleep(1)  # the signal comes meanwhile
    print("cleaned up", flush=True)

if os.environ["RANK"] == "0":
    atexit.register(clean_up)
    raise ConnectionError("Connection reset by peer")
print("up", flush=True)
time.sleep(60)
"""


def test_ctrl_c_right_after_a_rank_has_lost_another(script, tmp_path: Path) -> None:
    """It may come earlier to one node than to the next. What Python does at a failed script's exit is not disturbed."""
    code, lines, _ = interrupted(tmp_path, script(JUST_FAILED), signal.SIGINT, *WITHOUT_TORCH)
    assert (code, len(lines)) == (130, 2), lines
    log = (tmp_path / "runs/latest/rank-0.log").read_text()
    assert "cleaned up" in log
    assert "KeyboardInterrupt" not in log


def test_ctrl_c_twice_is_at_once(script, tmp_path: Path) -> None:
    code, lines, seconds = interrupted(
        tmp_path, script(STUBBORN), signal.SIGINT, *WITHOUT_TORCH, "--shutdown-timeout", "30", times=2
    )
    assert (code, len(lines)) == (130, 3), lines
    assert lines[-1].endswith("killed; what was being saved may be incomplete")
    assert seconds <= 2.0


def test_sigterm(script, tmp_path: Path) -> None:
    code, lines, seconds = interrupted(tmp_path, script(INTERRUPT), signal.SIGTERM)
    assert (code, len(lines)) == (143, 2)
    assert seconds <= 2.0


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_rank_ignores_sigterm(script, tmp_path: Path) -> None:
    code, _, seconds = interrupted(
        tmp_path, script(STUBBORN), signal.SIGTERM, *WITHOUT_TORCH, "--shutdown-timeout", "2"
    )
    assert code == 143
    assert 2.0 <= seconds <= 3.5


def test_a_survivor_ignores_sigterm(phalanx: Runner, script, tmp_path: Path) -> None:
    name = script(
        f"""
        import os, signal, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("deaf"):
                time.sleep(0.01)
            {MOMENT}
            raise RuntimeError("enough")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("deaf", "w").close()
        time.sleep(60)
        """
    )
    outcome = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "2", "--shutdown-timeout", "1", name)
    assert block_of(outcome)[0] == "phalanx: rank 1 failed: RuntimeError: enough"
    assert 1.0 <= fault_to_end(tmp_path) <= 2.5


@pytest.mark.beside_others
def test_ctrl_c_while_the_ranks_are_being_started(script, tmp_path: Path) -> None:
    """Those that are on their way when the signal comes are told as well; those that are not yet are called off."""
    name = script("import time; print('up', flush=True); time.sleep(60)")
    agent = start("-m", "phalanx", "run", "--nproc-per-node", "24", name, cwd=tmp_path)
    log = tmp_path / "runs/latest/agent.events.jsonl"
    while not log.exists() or "started" not in log.read_text():
        time.sleep(0.005)
    agent.send_signal(signal.SIGINT)
    began = time.monotonic()
    agent.communicate(timeout=20)
    assert agent.returncode == 130
    assert time.monotonic() - began < 7.0


@pytest.mark.beside_others
def test_sigterm_to_every_process_leaves_time_to_save(script, tmp_path: Path) -> None:
    """As a batch system does it at the end of a job's time."""
    name = script(
        """
        import signal, sys, time
        def save(*_):
            time.sleep(0.5)
            open("saved", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("up", flush=True)
        time.sleep(60)
        """
    )
    agent = start("-m", "phalanx", "run", *WITHOUT_TORCH, name, cwd=tmp_path)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "up\n"
    for process in [*psutil.Process(agent.pid).children(recursive=True), psutil.Process(agent.pid)]:
        process.terminate()
    agent.communicate(timeout=20)
    assert agent.returncode == 143
    assert (tmp_path / "saved").exists()


@pytest.mark.beside_others
def test_a_hundred_and_fifty_processes(phalanx: Runner) -> None:
    outcome = phalanx("run", "--nproc-per-node", "150", "--no-python", "sh", "-c", "echo $RANK")
    assert outcome.code == 0, outcome.err
    assert sorted(int(line.rpartition(" ")[2]) for line in outcome.lines) == list(range(150))


@pytest.mark.beside_others
def test_the_block_is_seen_when_nobody_reads_the_output(script, tmp_path: Path) -> None:
    name = script("print('a')\nprint('b')\nraise ValueError('seen')")
    agent = start("-m", "phalanx", "run", *WITHOUT_TORCH, name, cwd=tmp_path)
    assert agent.stdout is not None
    agent.stdout.close()
    assert agent.stderr is not None
    assert "ValueError: seen" in agent.stderr.read()
    agent.stderr.close()
    assert agent.wait(timeout=10) == 1


@pytest.mark.beside_others
def test_nohup_is_respected(script, tmp_path: Path) -> None:
    name = script("import time; print('up', flush=True); time.sleep(1); print('finished')")
    ignore = (
        "import signal, os, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    agent = start("-c", ignore, sys.executable, "-m", "phalanx", "run", *WITHOUT_TORCH, name, cwd=tmp_path)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "up\n"
    agent.send_signal(signal.SIGHUP)
    out, _ = agent.communicate(timeout=20)
    assert (agent.returncode, out) == (0, "finished\n")


@pytest.mark.beside_others
def test_an_interrupt_before_anything_has_started(script, tmp_path: Path) -> None:
    agent = start("-m", "phalanx", "run", "--nproc-per-node", "2", script("print('no')"), cwd=tmp_path)
    assert agent.stderr is not None
    agent.stderr.readline()  # the run is announced; torch is being imported
    agent.send_signal(signal.SIGINT)
    out, _ = agent.communicate(timeout=5)
    assert (agent.returncode, out) == (130, "")


def test_a_busy_port_is_named_with_its_owner(phalanx: Runner, script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = phalanx("run", "--master-port", str(port), script("print('no')"))
    assert (outcome.code, outcome.out) == (2, "")
    assert len(outcome.err.splitlines()) == 1
    assert f"port {port} is taken by pid {os.getpid()} (" in outcome.err
    assert outcome.seconds < 2.0


RESTART = (
    HEADER
    + """
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for _ in range(3):
    step()
if attempt < int(sys.argv[1]) and rank == attempt % dist.get_world_size():
    if attempt % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError(f"attempt {attempt}")
step()
print("finished in attempt", attempt, flush=True)
dist.destroy_process_group()
"""
)


@pytest.mark.beside_others
def test_ten_restarts_in_one_run(phalanx: Runner, script) -> None:
    """No restart meets a key of the attempt before: each joins, trains and fails where it should."""
    outcome = phalanx("run", "--nproc-per-node", "4", "--max-restarts", "10", script(RESTART), "10", timeout=120)
    assert outcome.code == 0, outcome.err
    assert sorted(outcome.lines) == [f"[rank {rank}] finished in attempt 10" for rank in range(4)]
    restarts = [line for line in outcome.err.splitlines() if "starting again" in line]
    assert len(restarts) == 10
    assert "rank 0 failed: RuntimeError: attempt 0 at train.py:18; starting again, attempt 2 of 11" in restarts[0]
    assert "rank 1 failed: SIGKILL" in restarts[1]


@pytest.mark.beside_others
def test_restarts_run_out(phalanx: Runner, script) -> None:
    name = script(
        """
        import os, signal, time
        attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
        if rank == attempt == 0:
            raise RuntimeError("the first attempt")
        if rank == attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "2", "--max-restarts", "1", *WITHOUT_TORCH, name)
    assert outcome.code == 137
    block = outcome.complaint
    assert block[0].startswith("phalanx: rank 1 failed: SIGKILL")
    assert "attempt 2" in block[1]


@pytest.mark.beside_others
def test_a_crash_loop_ends(phalanx: Runner, script) -> None:
    """Whatever number of restarts is left: the fifth failure of one kind within seconds is the last."""
    name = script("import os; print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT']); raise OSError('no disk')")
    outcome = phalanx("run", "--max-restarts", "1000", *WITHOUT_TORCH, name)
    assert outcome.code == 1
    assert outcome.lines[-1] == "attempt 4"
    loop = "a crash loop: the same failure 5 times in a row without progress, 10 s apart at most"
    assert f"phalanx: {loop}; the 996 attempts left are not made" in outcome.err
    assert outcome.complaint[0].startswith("phalanx: rank 0 failed: OSError: no disk")


@pytest.mark.beside_others
def test_kills_of_different_ranks_are_no_crash_loop(phalanx: Runner, script) -> None:
    name = script(
        """
        import os, signal, time
        attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
        if attempt < 6:
            if rank == attempt % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        print("attempt", attempt)
        """
    )
    outcome = phalanx("run", "--nproc-per-node", "2", "--max-restarts", "9", *WITHOUT_TORCH, name)
    assert outcome.code == 0, outcome.err
    assert sorted(outcome.lines) == ["[rank 0] attempt 6", "[rank 1] attempt 6"]


@pytest.mark.beside_others
def test_the_old_attempt_is_gone_before_the_next_starts(phalanx: Runner, script) -> None:
    name = script(
        """
        import os, subprocess, psutil
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0":
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            open("child", "w").write(str(child.pid))
            raise SystemExit(5)
        print("left over:", psutil.pid_exists(int(open("child").read())))
        """
    )
    outcome = phalanx("run", *WITHOUT_TORCH, "--max-restarts", "1", name)
    assert outcome.out == "left over: False\n"


@pytest.mark.beside_others
def test_slow_clean_up_after_the_exception(phalanx: Runner, script) -> None:
    """The others lose their connection first and say so; the cause is still the rank that raised."""
    name = script(
        HEADER
        + """
try:
    if rank == 2:
        raise KeyError("the real reason")
    while True:
        step()
finally:
    dist.destroy_process_group()
    if rank == 2:
        time.sleep(1.5)
"""
    )
    outcome = phalanx("run", "--nproc-per-node", "4", name)
    block = block_of(outcome)
    assert block[0] == "phalanx: rank 2 failed: KeyError: 'the real reason'"
    assert "ranks 0, 1, 3 fell with it" in "".join(block)


@pytest.mark.beside_others
def test_a_rank_that_leaves_early_is_mentioned(phalanx: Runner, script) -> None:
    name = script(HEADER + "\nif rank == 1:\n    sys.exit(0)\nfor _ in range(100):\n    step()\n")
    outcome = phalanx("run", "--nproc-per-node", "2", "--shutdown-timeout", "2", name)
    text = "".join(block_of(outcome))
    assert "rank 0 failed" in text
    assert "rank 1 ended normally meanwhile" in text


@pytest.mark.beside_others
def test_sys_exit_with_a_code_names_the_line(phalanx: Runner, script) -> None:
    name = script(WITHOUT_TORCH_HEADER + "\nif rank == 1:\n    sys.exit(3)\nstep()\n")
    outcome = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "2", name)
    block = block_of(outcome)
    assert outcome.code == 3
    assert block[0] == "phalanx: rank 1 failed: sys.exit(3)"
    assert any("train.py:7: sys.exit(3)" in line for line in block)


@pytest.mark.beside_others
def test_an_error_in_the_script_itself(phalanx: Runner, script) -> None:
    outcome = phalanx("run", *WITHOUT_TORCH, "--nproc-per-node", "2", script("import os\ndef f(:\n"))
    block = block_of(outcome)
    assert "SyntaxError" in block[0]
    assert any("train.py:2" in line for line in block)


@pytest.mark.beside_others
def test_missing_things_are_said_before_the_start(phalanx: Runner, script, tmp_path: Path) -> None:
    for arguments, text in (
        (["nothing.py"], "the script nothing.py does not exist"),
        (["--no-python", "no-such-program"], "no-such-program is not on PATH"),
        (["--nnodes", "2", script("")], "--nnodes 2 needs --master-addr"),
        (["--log-dir", "/proc/none", script("")], "cannot write the run directory /proc/none"),
        (["--run-path", script("")], "--run-path needs an absolute path"),
    ):
        outcome = phalanx("run", *arguments)
        assert outcome.code == 2
        assert text in outcome.err
        assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.beside_others
def test_a_full_disk_ends_the_log_and_not_the_run(phalanx: Runner, script, tmp_path: Path) -> None:
    """A file system of 128 KiB for the run directory."""
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(small)], check=True)
    try:
        outcome = phalanx(
            "run", *WITHOUT_TORCH, "--log-dir", "small", script("for i in range(20000): print(f'line {i:06}')")
        )
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert outcome.code == 0
    assert outcome.out == "".join(f"line {i:06}\n" for i in range(20000))
    assert "No space left on device. The log ends here" in outcome.err
