"""What is said after a failure on GPUs: the cause, its victims, and what the driver knows."""

from __future__ import annotations

import os
import pwd
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx import backends, events, messages
from phalanx.devices import kernel_log
from phalanx.devices.gpu_state import GpuState
from phalanx.diagnose import run_directory
from phalanx.events import Ending, ErrorRecord, Frame, HangRecord
from phalanx.failure import failure_text, gpu_evidence
from phalanx.failure.root_cause import find_cause, is_consequence, is_victim
from phalanx.launch.agent.failure_judge import FailureJudge
from phalanx.launch.agent.rank_process import RankProcess
from phalanx.launch.agent.watchdogs import Watchdogs
from phalanx.launch.multinode import SingleNode
from phalanx.launch.output.line_splitter import Tail
from phalanx.launch.output.logs import LogFile
from phalanx.launch.process.zygote_messages import Exited
from phalanx.launch.spec.launch_spec import LaunchSpec, Program, placements
from phalanx.system import procfs
from phalanx.torch_compat import c10d
from tests.unit.test_devices import DUMP, DUPLICATE, KERNEL_LOG, REMOTE

# The form of each is that of the public reports named beside it; the numbers and paths are made up.
STACK = "".join(
    f"frame #{number}: c10d::ProcessGroupNCCL::{name} + 0x{number}d2 (0x7f3b6e71a8d2 in /opt/conda/lib/python3.11/"
    "site-packages/torch/lib/libtorch_cuda.so)\n"
    for number, name in enumerate(("WorkNCCL::checkTimeout(std::optional<long>)", "watchdogHandler()", "run()", "x()"))
)
WATCHDOG = f"""\
epoch 3 loss 0.25
[rank1]:[E1117 02:07:08.408271257 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=9141, OpType=_ALLGATHER_BASE, NumelIn=19008, NumelOut=152064, Timeout(ms)=600000) ran for 600020 \
milliseconds before timing out.
[rank1]:[E1117 02:07:08.465150152 ProcessGroupNCCL.cpp:2252] [PG ID 0 PG GUID 0(default_pg) Rank 1]  failure detected \
by watchdog at work sequence id: 9141 PG status: last enqueued work: 9142, last completed work: 9140
[rank1]:[E1117 02:07:08.465150152 ProcessGroupNCCL.cpp:734] [Rank 1] Some NCCL operations have failed or timed out. \
Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.
[rank1]:[E1117 02:07:08.465150152 ProcessGroupNCCL.cpp:748] [Rank 1] To avoid data inconsistency, we are taking the \
entire process down.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: [Rank 1] \
Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9141, OpType=_ALLGATHER_BASE, NumelIn=19008, \
NumelOut=152064, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call \
first):
{STACK}
Exception raised from ncclCommWatchdog at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1709 (most recent \
call first):
{STACK}
"""  # sgl-project/sglang#1693, huggingface/open-r1#620, instructlab/training#520
ILLEGAL = f"""\
step 12
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 2] Process group watchdog thread terminated with exception: CUDA error: \
an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call first):
{STACK}
"""  # InternLM/lmdeploy#3258, vllm-project/vllm#9308
NOT_DESTROYED = (
    "[rank0]:[W1117 10:00:00.1 ProcessGroupNCCL.cpp:1524] Warning: WARNING: destroy_process_group() was not called "
    "before program exit, which can leak resources."
)  # huggingface/open-r1#620
ABORTED = (
    "NCCL communicator was aborted on rank 3.  Original reason for failure was: [Rank 3] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, Timeout(ms)=1800000) ran for 1805457 milliseconds"
)  # zai-org/GLM-130B#132, mlfoundations/open_clip#1087
CLOSED = """\
NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, unhandled system error, NCCL version 2.18.1
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketProgress: Connection closed by remote peer node7<51159>
"""  # NVIDIA/nccl#1235
CUDA_CALL = """\
NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with NCCL_DEBUG=INFO for \
details), NCCL version 2.20.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 1 'invalid argument'
"""  # NVIDIA/nccl#1410
BACKEND = "torch.distributed.DistBackendError"


def ended(
    rank: int,
    output: str,
    number: int | None = signal.SIGABRT,
    code: int | None = None,
    error: ErrorRecord | None = None,
) -> Ending:
    """The end of a rank that has printed this, as the agent sees it."""
    tail = Tail()
    tail.add(output.encode())
    process = RankProcess(placements([4])[rank], tail=tail)
    process.error = error
    process.set_exited(Exited(rank, 100 + rank, code, number))
    try:
        return process.ending()
    finally:
        process.close()


def raised(rank: int, moment: float, kind: str, message: str, output: str = "") -> Ending:
    frames = (Frame("/elsewhere/train.py", 7, "step", "loss.backward()"),)
    error = ErrorRecord(rank, 100 + rank, moment, kind, message, frames, "Traceback …", 1)
    return ended(rank, output, None, 1, error)


def block_of(*endings: Ending) -> list[str]:
    return failure_text.failure_block(find_cause(endings), world_size=4, host="h", started=0.0, log="/x/rank.log")


def test_an_abort_by_nccls_watchdog_is_a_victim() -> None:
    """It is the rank that has waited. What has kept another from coming is the cause."""
    waited = messages.replace(ended(1, WATCHDOG), time=1.0)
    assert is_victim(waited)
    verdict = find_cause([waited, raised(0, 2.0, "ValueError", "x")])
    assert (verdict.cause.rank, verdict.victims) == (0, (1,))
    [line, *_] = block_of(waited)
    assert line == "rank 1 failed: all_gather_into_tensor #9141 did not end within 600 s on all ranks"


def test_who_has_not_come_to_a_collective_is_the_cause() -> None:
    """No rank has failed by itself: those that gave up waiting have ended, and the last one was stopped then."""
    groups = ("0", 9142, 9140), ("1", 9999, 9999)
    waited = [messages.replace(ended(rank, WATCHDOG), time=1.0 + rank, groups=groups) for rank in (0, 1)]
    waits = Ending(2, 102, 12.0, signal=signal.SIGTERM, asked=True, groups=groups)
    missing = Ending(3, 103, 12.0, signal=signal.SIGTERM, asked=True, groups=(("1", 3, 3), ("0", 9140, 9140)))
    verdict = find_cause([*waited, waits, missing])
    assert (verdict.cause.rank, verdict.victims, verdict.cause.status) == (3, (0, 1, 2), 1)
    block = block_of(*waited, waits, missing)
    assert block[0] == "rank 3 failed: it has not come to all_gather_into_tensor #9141, for which rank 0 waited 600 s"
    assert "stopped by the launcher" in block[1]
    # torch may have ended it, too, and not the launcher.
    dumped = messages.replace(
        missing, signal=signal.SIGABRT, asked=False, time=0.5, device_error=ended(3, DUMP).device_error
    )
    assert find_cause([*waited, waits, dumped]).cause.rank == 3
    # If nobody's page proves that it has not come, nobody can be named.
    for others in ([waits], [waits, messages.replace(missing, groups=())]):
        block = block_of(*waited, *others)
        assert block[0] == "rank 0 failed: all_gather_into_tensor #9141 did not end within 600 s on all ranks"
        assert block[2] == "  it is not known which rank has not come"
    not_recorded = [messages.replace(one, groups=()) for one in waited]
    assert find_cause([*not_recorded, waits, missing]).cause.rank == 0


def test_a_verdict_on_a_stall_stands_when_the_watchdog_aborts(tmp_path: Path) -> None:
    nothing: Any = None
    spec = LaunchSpec(Program("script", "train.py"))
    watchdogs = Watchdogs(spec, tmp_path, nothing, nothing, lambda: None)
    watchdogs._stall = HangRecord("rank 3 is stuck in a read of /data")
    judge = FailureJudge(tmp_path, spec, nothing, watchdogs, SingleNode.__new__(SingleNode))
    missing = Ending(3, 103, 12.0, signal=signal.SIGTERM, asked=True)
    assert judge.judge([ended(1, WATCHDOG), missing], []) == (
        None,
        "rank 3 is stuck in a read of /data; rank 1 has given up waiting",
    )


@pytest.mark.parametrize("code", [None, 1])
def test_an_error_of_cuda_is_the_cause_and_the_headline(code: int | None) -> None:
    failed = ended(2, ILLEGAL, None if code else signal.SIGABRT, code)
    assert not is_victim(failed)
    verdict = find_cause([messages.replace(ended(1, WATCHDOG), time=1.0), messages.replace(failed, time=2.0)])
    assert (verdict.cause.rank, verdict.victims) == (2, (1,))
    block = "\n".join(block_of(failed))
    assert block.startswith("rank 2 failed: CUDA error: an illegal memory access was encountered\n")
    assert "the line may be another one; run again with CUDA_LAUNCH_BLOCKING=1" in block
    assert "step 12" in block
    assert "frame #" not in block


def test_an_abort_is_waited_for_only_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait as long as the group's timeout; and what it raises must not hide why the group is left."""
    over, called = threading.Event(), threading.Event()

    def fail() -> None:
        called.set()
        over.wait(10)
        raise RuntimeError("no abort for this backend")

    monkeypatch.setattr(c10d.ABORT, "get", lambda: fail)
    begun = time.monotonic()
    backends.abort(torch.device("cpu"), seconds=0.05)
    assert called.is_set()
    assert time.monotonic() - begun < 5
    over.set()
    for thread in threading.enumerate():
        if thread.name == "phalanx-abort":
            thread.join()


def test_an_exception_that_was_handled_long_ago_is_not_the_cause(tmp_path: Path) -> None:
    """A rank left its group with it, and lived on."""
    for seconds, expected in ((1.0, "ValueError: x"), (100.0, "SIGSEGV")):
        log = LogFile(tmp_path / "rank-0.log", print)
        process = RankProcess(placements([1])[0], logs=[log], error_logs=[log])
        process._leaving = raised(0, time.time() - seconds, "ValueError", "x").error
        process.set_exited(Exited(0, 100, None, signal.SIGSEGV))
        assert failure_text.headline(process.ending()).startswith(expected)
        process.close()
    assert (tmp_path / "rank-0.log").read_text() == "Traceback …"


def test_the_lines_of_cpp_take_no_room() -> None:
    ending = ended(0, f"epoch 3\n{NOT_DESTROYED}\n", None, 1)
    assert ending.tail == ("epoch 3",)
    assert not any(line.startswith(("frame #", "Exception raised")) for line in ended(1, WATCHDOG).tail)


def test_the_report_shows_no_lines_of_cpp_either(tmp_path: Path) -> None:
    events.log_path(tmp_path, 1).write_text(f"step 12\n{STACK}\n{NOT_DESTROYED}\n")
    assert run_directory.last_lines(tmp_path, 1, 3) == ["step 12"]


def test_an_exception_without_a_message_is_no_error_of_a_device() -> None:
    """Whatever the rank has printed before."""
    assert failure_text.headline(raised(0, 1.0, "AssertionError", "", ILLEGAL)) == "AssertionError"


def test_what_follows_last_error_is_the_headline() -> None:
    alike = [raised(rank, 1.0 + rank, BACKEND, DUPLICATE) for rank in (0, 1)]
    verdict = find_cause(alike)
    assert (verdict.cause.rank, verdict.alike, verdict.victims) == (0, (1,), ())
    expected = "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10"
    assert block_of(*alike)[0] == f"rank 0 failed: {expected}"
    verdict = find_cause([raised(0, 1.0, BACKEND, REMOTE), raised(1, 2.0, BACKEND, CUDA_CALL)])
    assert (verdict.cause.rank, verdict.victims) == (1, (0,))


# NVIDIA/nccl#1410, pytorch/pytorch#170045, NVIDIA/nccl#1235, vllm-project/vllm#17098
@pytest.mark.parametrize(
    ("text", "headline"),
    [
        ("".join(f"[rank7]: {line}\n" for line in CUDA_CALL.splitlines()), "Cuda failure 1 'invalid argument'"),
        (CUDA_CALL.replace("Cuda failure 1 'invalid argument'", f"\n{STACK}"), "Call to CUDA function failed."),
        (CUDA_CALL.partition("Last error")[0], "Call to CUDA function failed."),
    ],
    ids=["prefixed", "without last error", "older"],
)
def test_the_reason_in_other_forms_of_an_error_of_nccl(text: str, headline: str) -> None:
    assert failure_text.headline(ended(0, text)) == f"ncclUnhandledCudaError: {headline}"


def test_an_error_that_triton_has_noticed_is_late_too() -> None:
    ending = raised(0, 1.0, "RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered")
    assert ending.device_error is not None
    assert "CUDA_LAUNCH_BLOCKING=1" in ending.device_error.advice
    assert raised(0, 1.0, "RuntimeError", "CUDA error: invalid device ordinal").device_error.advice == ""  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (REMOTE, True),
        (ABORTED, True),
        (CLOSED, True),
        (
            "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key "
            "'0', but store->get('0') got error: wait timeout after 600000ms",
            True,
        ),
        (DUPLICATE, False),
        (CUDA_CALL, False),
        ("NCCL error in: ../NCCLUtils.hpp:181, unhandled cuda error, NCCL version 21.0.3", False),
    ],
)
def test_which_errors_of_nccl_are_consequences(text: str, expected: bool) -> None:
    error = raised(0, 1.0, BACKEND, text).error
    assert error is not None
    assert is_consequence(error) == expected


# ---- what the driver and NCCL know

OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 572.00 MiB. GPU 0 has a total capacity of 39.49 GiB of which 321.31 MiB is "
    "free. Process {} has 414.00 MiB memory in use. Including non-PyTorch memory, this process has 37.46 GiB memory in "
    "use. Process {} has 1.20 GiB memory in use. Of the allocated memory 36.04 GiB is allocated by PyTorch, and 321.37 "
    "MiB is reserved by PyTorch but unallocated."
)  # awslabs/keys_values#92
OLDER_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 690.00 MiB (GPU 0; 39.59 GiB total capacity; 973.79 MiB already allocated; "
    "474.62 MiB free; 1.72 GiB reserved in total by PyTorch)"
)  # raoyongming/DenseCLIP#52
NCCL_LOG = """\
NCCL version 2.27.3+cuda12.9
node7:3063028:3066152 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'

node7:3063028:3066152 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes
node7:3063028:3066152 [3] NCCL INFO transport/p2p.cc:204 -> 1
[2026-05-05 06:16:47] node7:3063028:3066152 [3] proxy.cc:1519 NCCL WARN \x1b[1m[Proxy Service 3] Failed to execute
"""  # NVIDIA/nccl#1235
USER, GIB = pwd.getpwuid(os.getuid()).pw_name, 1 << 30


def told(ending: Ending, directory: Path, *states: GpuState, log: str = "", others: Sequence[Ending] = ()) -> list[str]:
    """What is known of the GPU of the first of these. ``log``: that of the kernel."""
    (directory / "kmsg").write_text(log)
    xids = kernel_log.xids(60.0, directory / "kmsg", now=100.0)
    [first, *_] = gpu_evidence.add([ending, *others], states, xids, directory)
    return list(first.evidence)


def test_who_else_uses_the_gpu_after_an_out_of_memory(tmp_path: Path) -> None:
    other = raised(1, 1.0, "ValueError", "x")
    text = OUT_OF_MEMORY.format(101, os.getpid())
    name = Path(procfs.command(os.getpid()).split()[0]).name
    expected = f"also in its memory: rank 1 of this run 414.00 MiB, pid {os.getpid()} ({name} of {USER}) 1.20 GiB"
    assert told(raised(0, 1.0, "torch.OutOfMemoryError", text), tmp_path, others=[other]) == [expected]
    # torch has not found its own process in the driver's list: that counts pids as the host does.
    hidden = text.replace("this process has", "somebody has")
    assert told(raised(0, 1.0, "torch.OutOfMemoryError", hidden), tmp_path, others=[other]) == [
        f"also in its memory: pid 101 of the host 414.00 MiB, pid {os.getpid()} of the host 1.20 GiB"
    ]
    # An older torch, and other kinds of device, do not say who.
    gpu = GpuState(
        2, "H100", memory_used=39 * GIB, memory_total=40 * GIB, processes=((100, 39 * GIB), (101, GIB), (9, 2**64 - 1))
    )
    older = raised(0, 1.0, "torch.cuda.OutOfMemoryError", OLDER_OUT_OF_MEMORY)
    assert told(older, tmp_path, gpu, others=[other])[0] == "its GPU 2, H100: 39.0 of 40.0 GiB"
    assert told(older, tmp_path, gpu, others=[other])[1] == "also in its memory: rank 1 of this run 1.0 GiB, pid 9"
    assert len(told(raised(0, 1.0, "ValueError", "x"), tmp_path, gpu)) == 1


def test_the_name_of_a_foreign_process_cannot_change_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "command", lambda pid: "/x/\x1b]0;owned\x07\x9b2J" + "a" * 999)
    text = OUT_OF_MEMORY.format(101, os.getpid())
    [line] = told(raised(0, 1.0, "torch.OutOfMemoryError", text), tmp_path)
    assert line.isprintable()
    assert f"pid {os.getpid()} (]0;owned2Jaa" in line
    assert len(line) < 150
    ending = messages.replace(ended(0, ILLEGAL), evidence=("its GPU \x1b[2Jis hot",))
    assert all(map(str.isprintable, block_of(ending)))


def test_errors_of_the_hardware_before_this_attempt_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    monkeypatch.setattr(gpu_evidence, "recent_xids", lambda started, states: seen.append(started) or [])
    nothing: Any = None
    spec = LaunchSpec(Program("script", "train.py"))
    watchdogs = Watchdogs(spec, tmp_path, nothing, nothing, lambda: None)
    before = time.time()
    watchdogs.begin("runs/x", None)
    record: Any = SimpleNamespace(started=before - 3600.0)  # of the run
    judge = FailureJudge(tmp_path, spec, record, watchdogs, SingleNode.__new__(SingleNode))
    judge.add_evidence([ended(0, ILLEGAL)])
    assert before <= seen[0] <= time.time()


def test_errors_of_the_hardware_beside_a_rank(tmp_path: Path) -> None:
    gpu = GpuState(
        2, "H100", memory_used=GIB, memory_total=40 * GIB, ecc_errors=3, bus="0000:b3:00", processes=((100, GIB),)
    )
    seen = told(raised(0, 1.0, "ValueError", "x"), tmp_path, gpu, log=KERNEL_LOG)
    assert seen[1:] == [
        "GPU 2: 3 uncorrectable ECC errors since its driver was loaded (nvidia-smi -q)",
        "the driver has logged Xid 79 for the GPU at 0000:b3:00: the GPU has fallen off the bus: the machine needs a "
        "restart, or its hardware a check",
    ]
    # By the pid of a rank that has ended; without a pid, for every rank that its device has ended.
    assert [line[:29] for line in told(raised(0, 1.0, "ValueError", "x"), tmp_path, log=KERNEL_LOG)] == []
    aborted = told(ended(0, ILLEGAL), tmp_path, log=KERNEL_LOG.replace("pid=77", "pid=100"))
    assert [line[:29] for line in aborted] == ["the driver has logged Xid 31 ", "the driver has logged Xid 79 "]


def test_what_nccl_and_torch_have_written_into_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "nccl.100.log").write_text("x" * (1 << 20) + "\n" + NCCL_LOG)
    (tmp_path / "nccl_trace_rank_0").write_bytes(b"a pickle that nobody loads")
    warned, traced = told(raised(0, time.time(), BACKEND, CUDA_CALL), tmp_path)
    assert warned == "NCCL has warned: Failed to CUDA calloc 6291456 bytes; [1m[Proxy Service 3] Failed to execute"
    assert traced.startswith("torch has written the last collectives of each rank: torchfrtrace -p nccl_trace_rank_ ")
    assert told(raised(0, time.time() + 3600, BACKEND, CUDA_CALL), tmp_path) == [warned], "of an earlier attempt"
    (tmp_path / "nccl.100.log").unlink()
    (tmp_path / "nccl.100.log").symlink_to("/etc/passwd")
    (tmp_path / "nccl_trace_rank_0").unlink()
    assert told(raised(0, 1.0, BACKEND, CUDA_CALL), tmp_path) == []


def test_evidence_fills_the_room_that_is_left() -> None:
    ending = messages.replace(ended(2, ILLEGAL + "printed\n" * 9), evidence=tuple(f"fact {n}" for n in range(20)))
    block = block_of(ending)
    assert len(block) <= 15
    assert "  fact 3" in block
