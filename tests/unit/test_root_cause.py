"""The cause, told apart from its victims; and the words for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from phalanx import messages
from phalanx.events import (
    DeviceError,
    Ending,
    ErrorRecord,
    Frame,
    NativeFrame,
    OutOfMemory,
    SharedMemory,
)
from phalanx.failure import crash_dump, failure_text
from phalanx.failure.crash_loop import CrashLoop, identity
from phalanx.failure.root_cause import Verdict, failed_before, find_cause, is_consequence
from phalanx.source_lines import shorten_path

MIB, GIB = 1 << 20, 1 << 30
LOADER = """\
Caught KeyError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/usr/lib/python3/dist-packages/torch/utils/data/_utils/worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
           ^^^^^^^^^^^^^^^^^^^^
  File "/elsewhere/data.py", line 40, in __getitem__
    return self.labels[index]
           ~~~~~~~~~~~^^^^^^^
KeyError: 'no such label'
"""

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2711"


def error(rank: int, moment: float, kind: str = "ValueError", message: str = "x", frames: int = 1) -> ErrorRecord:
    lines = tuple(Frame(f"/elsewhere/train{n}.py", n, "step", "do()") for n in range(frames))
    return ErrorRecord(rank, 100 + rank, moment, kind, message, lines, "Traceback …", 1)


def raised(rank: int, moment: float, kind: str = "ValueError", message: str = "x", **more) -> Ending:
    return Ending(rank, 100 + rank, moment, exit_code=1, error=error(rank, moment, kind, message), **more)


def test_the_first_failure_in_time_is_the_cause() -> None:
    verdict = find_cause([raised(0, 5.0, "KeyError"), raised(1, 3.0), raised(2, 4.0, "OSError")])
    assert (verdict.cause.rank, verdict.victims, verdict.alike) == (1, (0, 2), ())


def test_a_failure_stays_one_when_its_rank_is_stopped_for_another() -> None:
    """Both failed at once, and the one that was heard of later was told to stop meanwhile."""
    verdict = find_cause([raised(0, 1.0), messages.replace(raised(1, 0.9), exit_code=None, signal=15)])
    assert (verdict.cause.rank, verdict.cause.status) == (1, 1)
    block = failure_text.failure_block(verdict, world_size=2, host="h", started=0.0, log="/x/rank-1.log")
    assert "exit code 1, " in block[1]
    interrupted = messages.replace(raised(0, 1.0, "KeyboardInterrupt"), exit_code=None, signal=2)
    assert interrupted.status == 130


def test_who_loses_a_rank_to_a_signal_has_not_failed() -> None:
    """Ctrl-C reaches one node earlier than another. What had failed before, or fails by itself, is told."""
    stopped = raised(1, 10.0, "KeyboardInterrupt", asked=True)
    assert not failed_before(10.0, [raised(0, 9.9, "phalanx.errors.PeerLost"), stopped])
    assert not failed_before(10.0, [raised(0, 9.9, "RuntimeError", GLOO), stopped])
    assert not failed_before(10.0, [stopped, Ending(2, 102, 8.0, exit_code=0)])
    assert failed_before(10.0, [raised(0, 8.0, "phalanx.errors.CollectiveTimeout"), stopped])
    assert failed_before(10.0, [raised(0, 9.9), stopped])


def test_who_fails_in_the_same_way_is_no_victim() -> None:
    endings = [raised(0, 1.0), raised(1, 2.0), raised(2, 3.0, asked=True), raised(3, 4.0, "RuntimeError", GLOO)]
    verdict = find_cause(endings)
    assert (verdict.cause.rank, verdict.alike, verdict.victims) == (0, (1, 2), (3,))
    crash = (Frame("/elsewhere/train.py", 3, "step", "call()"),)
    verdict = find_cause([Ending(0, 1, 1.0, signal=11, crash=crash), Ending(1, 2, 1.1, signal=11, crash=crash)])
    assert verdict.alike == (1,)
    at_once = [Ending(rank, rank, 1.0, signal=6, crash=crash, asked=rank > 0) for rank in range(3)]
    verdict = find_cause([*at_once, Ending(3, 4, 1.1, signal=15, asked=True)])
    assert (verdict.alike, verdict.victims) == ((1, 2), (3,)), "told to stop when they had begun to abort"
    assert find_cause([Ending(0, 1, 1.0, signal=9), Ending(1, 2, 1.1, signal=9)]).alike == ()


def test_who_has_called_another_collective_is_no_victim() -> None:
    """One of them may be stopped before it has told its error: its page knows where it was."""
    here, there = (Frame("/elsewhere/train.py", line, "step", f"call({line})") for line in (10, 8))
    kind, text = "phalanx.errors.CollectiveMismatch", "rank 1 called broadcast where rank 0 called all_reduce."
    endings = [
        raised(0, 1.0, kind, text, called=here),
        Ending(1, 101, 1.1, signal=15, asked=True, called=there),
        raised(2, 1.2, kind, text, called=here),
        raised(3, 1.3, "RuntimeError", GLOO, called=there),
        Ending(4, 104, 1.4, signal=15, asked=True),
    ]
    verdict = find_cause(endings)
    assert (verdict.cause.rank, verdict.alike, verdict.victims) == (0, (2,), (3, 4))
    assert verdict.elsewhere == ((there, (1,)),)
    block = failure_text.failure_block(verdict, world_size=5, host="h", started=0.0, log="/x/rank-0.log")
    assert block[2:6] == [
        "  at /elsewhere/train0.py:0 in step: do()",
        "  rank 1 at /elsewhere/train.py:8 in step: call(8)",
        "  rank 2 failed in the same way",
        "  ranks 3, 4 fell with it",
    ]
    fell = find_cause([raised(0, 1.0, called=here), Ending(1, 101, 1.1, signal=15, asked=True, called=there)])
    assert (fell.victims, fell.elsewhere) == ((1,), ())


def test_gloo_ends_the_rank_that_notices() -> None:
    """The others lose their connection to it, at the lines where they had called something else."""
    here, there = (Frame("/elsewhere/train.py", line, "step", f"call({line})") for line in (10, 8))
    said = "  what():  [enforce fail at /x/pair.cc:456] op.preamble.length <= op.nbytes. 772 vs 4. Received data size …"
    aborted = Ending(1, 101, 1.0, signal=6, tail=("terminate called …", said), called=here, crash=(here,))
    verdict = find_cause([raised(0, 1.1, "RuntimeError", GLOO, called=there), aborted, Ending(2, 102, 1.2, signal=15)])
    assert (verdict.cause.rank, verdict.victims, verdict.elsewhere) == (1, (2,), ((there, (0,)),))
    block = failure_text.failure_block(verdict, world_size=3, host="h", started=0.0, log="/x/rank-1.log")
    assert block[0].startswith(
        "rank 1 failed: SIGABRT, gloo has received 772 bytes where 4 were expected: the ranks have"
    )
    assert "  rank 0 at /elsewhere/train.py:8 in step: call(8)" in block
    other = messages.replace(aborted, tail=("terminate called …",))
    assert "native code gave up" in failure_text.headline(other)
    assert find_cause([raised(0, 1.1, "RuntimeError", GLOO, called=there), other]).victims == (0,)


def test_an_exception_that_only_python_has_told() -> None:
    """A file beside the script has the name of a module of Python's: the rank runs without us."""
    ends = [Ending(rank, 100 + rank, 1.0 + rank, exit_code=1, tail=("x", "NameError: no setup")) for rank in (0, 1)]
    verdict = find_cause([*ends, Ending(2, 102, 4.0, exit_code=1, tail=("an error: it says",))])
    assert (verdict.alike, verdict.victims) == ((1,), (2,))
    assert failure_text.headline(ends[0]) == "NameError: no setup"
    assert (
        failure_text.headline(Ending(2, 102, 4.0, exit_code=3, tail=("done: all",)))
        == "exit code 3, without an exception"
    )


def test_whom_the_kernel_has_chosen_is_the_cause() -> None:
    """A process with much memory takes its time to end: others may have failed, and been stopped, before that."""
    endings = [
        raised(0, 1.0, "KeyError"),
        Ending(1, 101, 2.0, signal=9, asked=True, out_of_memory=OutOfMemory(101, 3 * GIB, 4 * GIB, "/job")),
        Ending(2, 102, 2.1, signal=9, asked=True, out_of_memory=OutOfMemory(102, GIB, 4 * GIB, "/job")),
        Ending(3, 103, 2.2, signal=15, asked=True),
    ]
    verdict = find_cause(endings)
    assert (verdict.cause.rank, verdict.alike, verdict.victims) == (1, (2,), (0, 3))
    block = failure_text.failure_block(verdict, world_size=4, host="h", started=0.0, log="/x/rank-1.log")
    assert block[0] == (
        "rank 1 failed: SIGKILL, killed by the kernel for memory: the limit is 4.0 GiB, rank 1 used 3.0 GiB"
    )
    assert block[2].startswith("  the limit is that of the control group /job; raise it (docker run --memory, ")
    assert "  rank 2 failed in the same way" in block


def test_a_lost_connection_is_never_the_cause_while_another_error_is_known() -> None:
    endings = [
        raised(0, 1.0, "RuntimeError", GLOO),
        raised(1, 9.0, "KeyError"),
        Ending(2, 102, 2.0, signal=15, asked=True),
    ]
    assert find_cause(endings).cause.rank == 1


def test_a_rank_that_was_told_to_stop_is_no_cause() -> None:
    endings = [Ending(0, 100, 1.0, signal=15, asked=True), Ending(1, 101, 2.0, signal=9)]
    verdict = find_cause(endings)
    assert (verdict.cause.rank, verdict.victims) == (1, (0,))


def test_only_lost_connections_point_at_who_left() -> None:
    verdict = find_cause([raised(0, 2.0, "RuntimeError", GLOO), Ending(1, 101, 1.0, exit_code=0)])
    assert (verdict.cause.rank, verdict.left_early) == (0, (1,))


def test_what_counts_as_a_consequence() -> None:
    assert is_consequence(error(0, 0, "torch.distributed.DistNetworkError", "anything"))
    assert is_consequence(error(0, 0, "RuntimeError", GLOO))
    assert is_consequence(error(0, 0, "phalanx.errors.PeerFailed", "rank 0 went first and failed"))
    assert not is_consequence(error(0, 0, "RuntimeError", "mat1 and mat2 shapes cannot be multiplied"))
    assert not is_consequence(error(0, 0, "ValueError", "connection closed by peer"))
    assert not is_consequence(error(0, 0, "RuntimeError", LOADER.replace("no such label", "connection refused")))


def test_the_block_never_exceeds_15_lines() -> None:
    long = error(1, 1.0, message="a" * 500 + "\nsecond line", frames=9)
    cause = Ending(1, 101, 1.0, exit_code=1, error=long, tail=tuple(f"printed {n}" * 40 for n in range(5)))
    verdict = find_cause([cause, *(Ending(r, 100 + r, 2.0, signal=15, asked=True) for r in range(2, 40))])
    block = failure_text.failure_block(verdict, world_size=40, host="h", started=0.0, log="/x/rank-1.log", attempts=3)
    assert len(block) <= 15
    assert all(len(line) <= 160 for line in block)
    assert "38 other ranks fell with it" in "".join(block)
    ours = error(1, 1.0, "phalanx.errors.UsageError", "that cannot be; " + "so do it in another way " * 9, frames=9)
    noted = messages.replace(long, note="these parameters " * 40)
    stack = tuple(NativeFrame(f"/lib/library{n}.so", f"call_{n}+0x1f") for n in range(9))
    full = messages.replace(cause, signal=7, native=stack, shared_memory=SharedMemory(1 << 26, 1 << 26))
    tight = OutOfMemory(101, GIB, GIB, "/kubepods.slice/" + "pod" * 60)
    for ending in (
        messages.replace(cause, error=ours),
        messages.replace(full, error=noted, out_of_memory=tight),
        messages.replace(full, error=None, crash=long.frames),
    ):
        verdict = Verdict(ending, (2, 3), (4, 5), ())
        block = failure_text.failure_block(
            verdict, world_size=40, host="h", started=0.0, log="/x/rank-1.log", attempts=3
        )
        assert len(block) <= 15
        assert all(len(line) <= 160 for line in block)
        assert block[-1].endswith("/x/rank-1.log")


def test_headlines() -> None:
    assert failure_text.headline(Ending(0, 1, 0.0, signal=9)).startswith("SIGKILL, killed from outside")
    assert failure_text.headline(Ending(0, 1, 0.0, signal=60)) == "signal 60"
    assert failure_text.headline(raised(0, 0.0, "RuntimeError", LOADER)) == (
        "KeyError: 'no such label' (in DataLoader worker process 3)"
    )
    assert failure_text.headline(Ending(0, 1, 0.0, exit_code=4)) == "exit code 4, without an exception"
    assert failure_text.headline(raised(0, 0.0, "MemoryError", "")) == "MemoryError"


def test_the_line_within_a_loaders_worker_is_shown() -> None:
    verdict = find_cause([raised(0, 0.0, "RuntimeError", LOADER)])
    block = failure_text.failure_block(verdict, world_size=1, host="h", started=0.0, log="/x/rank-0.log")
    assert block[2:4] == [
        "  at /elsewhere/train0.py:0 in step: do()",
        "  at /elsewhere/data.py:40 in __getitem__: return self.labels[index]",
    ]


@pytest.mark.parametrize(
    ("space", "message", "words"),
    [
        (SharedMemory(64 * MIB, 64 * MIB), "", "SIGBUS, /dev/shm is full (64 MiB of 64 MiB)"),
        (
            SharedMemory(64 * MIB, 20 * MIB),
            "",
            "SIGBUS, /dev/shm had no room (20 MiB of 64 MiB in use around that time)",
        ),
        (SharedMemory(8 * GIB, MIB), "", "SIGBUS, a mapped file was cut off, or memory is damaged; /dev/shm has room"),
        (
            SharedMemory(64 * MIB, 20 * MIB),
            "shm: No space left on device",
            "  /dev/shm is too small: its 64 MiB did not suffice",
        ),
    ],
    ids=["full", "perhaps", "room", "certain"],
)
def test_the_words_about_shared_memory(space: SharedMemory, message: str, words: str) -> None:
    told = error(0, 0.0, "RuntimeError", message) if message else None
    ending = Ending(0, 100, 0.0, signal=None if message else 7, exit_code=1, error=told, shared_memory=space)
    block = failure_text.failure_block(find_cause([ending]), world_size=1, host="h", started=0.0, log="/x/rank-0.log")
    assert any(line.removeprefix("rank 0 failed: ").startswith(words) for line in block), block
    assert any("docker run --shm-size" in line for line in block) == (space.total < GIB)


# As Python 3.14 writes it.
CRASH = """\
Fatal Python error: Segmentation fault

Thread 0x00007f1 [pool] (most recent call first):
  File "/elsewhere/pool.py", line 9 in wait

Current thread 0x00007f2 [python] (most recent call first):
  File "/elsewhere/extension.py", line 12 in call
  File "/elsewhere/train.py", line 40 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x42 [0x5b27f7d7147e]
  Binary file "/usr/lib/libc.so.6", at +0x3def0 [0x77b73226bef0]
  Binary file "/home/ada/fast.so", at scatter_rows+0x1f [0x77b7315dddf6]
  Binary file "/home/ada/fast.so", at +0xcdf6 [0x77b7315dddf6]
  Binary file "/usr/lib/libffi.so.8", at +0x7976 [0x77b73158f976]
  Binary file "/home/ada/torch/lib/libtorch_cpu.so", at _ZN2at4_opsE+0x2 [0x77b73158f977]
  Binary file "/home/ada/torch/lib/libtorch_cpu.so", at _ZN2at4_opsF+0x2 [0x77b73158f977]
  <truncated rest of calls>
"""


def test_native_stacks_are_read_and_shown_without_plumbing() -> None:
    frames = crash_dump.python_frames(CRASH)
    assert [(frame.file, frame.line) for frame in frames] == [
        ("/elsewhere/extension.py", 12),
        ("/elsewhere/train.py", 40),
    ]
    assert len(crash_dump.native_frames(CRASH)) == 7
    assert crash_dump.native_frames(CRASH.partition("Current thread's")[0]) == ()
    crashed = Ending(0, 1, 0.0, signal=11, crash=frames, native=crash_dump.native_frames(CRASH))
    block = failure_text.failure_block(find_cause([crashed]), world_size=1, host="h", started=0.0, log="/x/rank-0.log")
    assert block[2:7] == [
        "  at /elsewhere/train.py:40",
        "  at /elsewhere/extension.py:12 in call",
        "  in native code: scatter_rows+0x1f of /home/ada/fast.so",
        "  in native code: +0xcdf6 of /home/ada/fast.so",
        "  in native code: _ZN2at4_opsE+0x2 of /home/ada/torch/lib/libtorch_cpu.so",
    ]


def test_of_a_thread_of_cpp_that_crashed_the_main_thread_is_shown() -> None:
    """As when gloo aborts: faulthandler knows no Python thread that is the current one."""
    frames = crash_dump.python_frames(CRASH.partition("Current thread's")[0].replace("Current thread", "Thread"))
    assert [(frame.file, frame.line) for frame in frames][-1] == ("/elsewhere/train.py", 40)


def test_an_ending_survives_the_way_to_another_node() -> None:
    full = Ending(
        *(1, 101, 2.0),
        error=messages.replace(error(1, 2.0), note="more"),
        crash=(Frame("/x.py", 1, "f", "g()"),),
        native=(NativeFrame("/x.so", "f+0x1"),),
        memory=GIB,
        out_of_memory=OutOfMemory(101, GIB, GIB, "/job"),
        shared_memory=SharedMemory(2, 1),
        device_error=DeviceError("all_reduce #3 …", is_consequence=True, awaited=("all_reduce", 3), waited=600.0),
    )
    assert messages.decode(messages.encode(full), Ending, "here") == full


def is_loop(*failures: Ending) -> bool:
    repetition = CrashLoop()
    return [repetition.add(identity(cause), cause.time, [cause]) for cause in failures][-1]


def test_only_one_kind_of_failure_within_seconds_is_a_crash_loop() -> None:
    assert not is_loop(*(raised(0, 9.0 * n) for n in range(4)))
    assert is_loop(*(raised(0, 9.0 * n) for n in range(5)))
    assert not is_loop(*(raised(0, 11.0 * n) for n in range(9)))
    assert not is_loop(*(raised(0, float(n), message=f"attempt {n % 4 // 2}") for n in range(9)))


def test_progress_another_rank_and_another_place_are_no_crash_loop() -> None:
    killed = [Ending(0, 100 + n, float(n), signal=signal.SIGKILL) for n in range(6)]
    assert is_loop(*killed)
    assert not is_loop(*(messages.replace(one, rank=n % 4) for n, one in enumerate(killed)))
    assert not is_loop(*(messages.replace(one, progress=(10 * n, 0, 3)) for n, one in enumerate(killed)))
    assert not is_loop(*(messages.replace(one, progress=(0, n // 3, n)) for n, one in enumerate(killed)))
    assert not is_loop(*(messages.replace(one, updates=n) for n, one in enumerate(killed)))
    assert is_loop(*(raised(n % 2, float(n)) for n in range(5)))  # all ranks run into it, and one of them is first
    # It gets as far each time, and no further.
    assert is_loop(*(messages.replace(one, progress=(10, 0, 7 - n), updates=7) for n, one in enumerate(killed)))


def test_what_we_have_printed_ourselves_is_not_shown_again() -> None:
    ours = "phalanx: the backend is shm, not gloo: all 2 ranks are on this machine"
    for tail, shown in (((ours,), False), ((ours, "epoch 3"), True)):
        verdict = find_cause([raised(0, 1.0, tail=tail)])
        block = "\n".join(failure_text.failure_block(verdict, world_size=2, host="h", started=0.0, log="/x/rank-0.log"))
        assert ("  the last it printed:\n    epoch 3" in block, ours in block) == (shown, False)


def test_a_path_when_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    assert shorten_path(f"{gone}/train.py") == "train.py"
    gone.rmdir()
    assert shorten_path(f"{gone}/train.py") == f"{gone}/train.py"
