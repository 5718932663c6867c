"""GPUs as the driver reports them: NVML by a library that the test compiles, and the kernel's log from a file."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from phalanx.devices import gpu_state, kernel_log
from phalanx.failure import device_errors

FAKE_NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process;
static int numbers[2] = {0, 1};
int nvmlInit_v2(void) { return HANGS ? (sleep(1), 0) : 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index > 1) return 2;
    *handle = &numbers[index];
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, "GPU-two")) return 6;
    *handle = &numbers[1];
    return 0;
}
int nvmlDeviceGetName(void *handle, char *name, unsigned length) { strncpy(name, "Fake H100", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory_info *info) {
    info->total = 80ull << 30; info->used = 60ull << 30; info->free = 20ull << 30;
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *handle, utilization *rates) { rates->gpu = 100; rates->memory = 3; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    *milliwatts = *(int *)handle ? 640000 : 120000;
    return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *milliwatts) { *milliwatts = 700000; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) {
    *degrees = 40 + *(int *)handle;
    return sensor;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons) {
    *reasons = *(int *)handle ? 0x60 : 0x1;
    return 0;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count) { return 3; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process *found) {
    const char *path = getenv("FAKE_NVML_PID"); /* a file with the number of a process on the first GPU */
    FILE *file = path && !*(int *)handle ? fopen(path, "r") : NULL;
    *count = 1; found[0].pid = 4242; found[0].memory = 5ull << 30;
    if (file) { fscanf(file, "%u", &found[0].pid); fclose(file); }
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, char *info) { strcpy(info, "0000:B3:00.0"); return 0; }
"""


def fake_nvml(directory: Path, *, hangs: bool = False) -> str:
    library = directory / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-w", f"-DHANGS={int(hangs)}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=FAKE_NVML, text=True, check=True)
    return str(library)


def test_the_state_of_gpus(tmp_path: Path) -> None:
    spinning, hot = gpu_state.read(library=fake_nvml(tmp_path))
    assert (spinning.index, spinning.name, spinning.temperature) == (0, "Fake H100", 40)
    assert (spinning.memory_used, spinning.memory_total) == (60 << 30, 80 << 30)
    assert (spinning.utilization, spinning.power, spinning.power_limit) == (100, 120.0, 700.0)
    assert spinning.processes == ((4242, 5 << 30),)
    assert spinning.bus == "0000:b3:00"
    assert spinning.ecc_errors is None  # not supported by this GPU
    assert (spinning.may_wait, spinning.throttled_by) == (True, ())
    assert (hot.may_wait, hot.throttled_by) == (False, ("its temperature",))
    [by_name] = gpu_state.read(["GPU-two"], library=str(tmp_path / "libnvidia-ml.so.1"))
    assert by_name.power == 640.0
    assert gpu_state.read(["7"], library=str(tmp_path / "libnvidia-ml.so.1")) == []


def test_a_machine_without_the_driver_and_a_driver_that_hangs(tmp_path: Path) -> None:
    assert gpu_state.read(library=str(tmp_path / "none.so")) == []
    assert gpu_state.read(library=fake_nvml(tmp_path, hangs=True), limit=0.1) == []
    for thread in threading.enumerate():
        if thread.name == "phalanx-nvml":
            thread.join()


# After NVIDIA/NVSentinel#155 and leptonai/gpud#1209, in the form of /dev/kmsg.
KERNEL_LOG = """\
6,1200,5000000,-;usb 1-1: new high-speed USB device
3,1201,90000000,-;NVRM: Xid (PCI:0000:44:00): 31, pid=77, name=python, Ch 00000008, MMU Fault
3,1202,95000000,-;NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.
6,1203,broken,-;NVRM: Xid (PCI:0000:b3:00): 79
"""


def test_errors_in_the_kernels_log(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(KERNEL_LOG)
    first, second = kernel_log.xids(60.0, log, now=100.0)
    assert (first.number, first.bus, first.pid, first.seconds_ago) == (31, "0000:44:00", 77, 10.0)
    assert (second.number, second.pid) == (79, None)
    assert "fallen off the bus" in second.meaning
    assert [xid.number for xid in kernel_log.xids(7.0, log, now=100.0)] == [79]
    assert kernel_log.xids(60.0, tmp_path / "none") == []
    assert isinstance(kernel_log.xids(1.0), list)  # the real one, where it may be read


# The form of each is that of a public report, named beside it; the numbers and paths are made up.
TIMEOUT = """\
[rank1]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=4661, NumelOut=4661, Timeout(ms)=600000) ran for 600060 milliseconds \
before timing out.
[rank1]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 1] Exception (either an error or timeout) \
detected by watchdog at work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 1 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=4661, NumelOut=4661, Timeout(ms)=600000) ran for \
600060 milliseconds before timing out.
Exception raised from checkTimeout at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:609 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f3 in /opt/torch/lib/libc10.so)
frame #1: clone + 0x43 (0x7f4 in /lib/x86_64-linux-gnu/libc.so.6)
"""  # hiyouga/LlamaFactory#7396, NVIDIA/Megatron-LM#935
DEVICE_ASSERT = """\
/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1290: indexSelectLargeIndex: block: [8,0,0], thread: [64,0,0] Assertion \
`srcIndex < srcSelectDimSize` failed.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 1 Rank 1] Process group watchdog thread terminated with exception: CUDA error: device-side assert \
triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1.
"""  # sgl-project/sglang#271, NVIDIA/flowtron#52
DUPLICATE = """\
NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, invalid usage (run with NCCL_DEBUG=WARN for details), \
NCCL version 2.20.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10
"""  # verl-project/verl#161
REMOTE = """\
NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:219, remote process exited or there was a network error, \
NCCL version 2.14.3
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
NET/IB : Got completion from peer 10.0.0.7<42221> with error 12, opcode 0, len 0, vendor err 129
"""
LINE = "[rank6]:[{} 21:51:54.112142364 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID 0(default_pg) Rank 6] {}\n"
DUMP = (
    LINE.format("E703", "Observed flight recorder dump signal from another rank via TCPStore.")
    + LINE.format(
        "E703",
        "Received a dump signal due to a collective timeout from  rank 7 and we will try our best to dump the debug "
        "info. Last enqueued NCCL work: 56116, last completed NCCL work: 56116.This is most likely caused by …",
    )
    + LINE.format("E703", "ProcessGroupNCCL preparing to dump debug info. Include stack trace: 1")
    + LINE.format(
        "F703", "Terminating the process after attempting to dump debug info, due to collective timeout or exception."
    )
)  # the texts are those of torch's HeartbeatMonitor
HANDLED = "skipping batch: CUDA error: out of memory (handled, retrying)\n"


@pytest.mark.parametrize(
    ("text", "headline", "is_consequence"),
    [
        (DUMP, "a collective timed out on rank 7", True),
        (HANDLED + DUMP.replace(" rank 7", "this local rank"), "a collective timed out on this rank", True),
        (TIMEOUT + DUMP, "all_reduce #1580 did not end within 600 s on all ranks", True),
        (HANDLED + TIMEOUT, "all_reduce #1580 did not end within 600 s on all ranks", True),
        (TIMEOUT + HANDLED, "all_reduce #1580 did not end within 600 s on all ranks", True),
        (HANDLED + "CUDA error: no kernel image\n", "CUDA error: no kernel image", False),
        (TIMEOUT, "all_reduce #1580 did not end within 600 s on all ranks", True),
        (
            DEVICE_ASSERT,
            "CUDA error: device-side assert triggered (Indexing.cu:1290: srcIndex < srcSelectDimSize)",
            False,
        ),
        (DUPLICATE, "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10", False),
        (
            REMOTE,
            "ncclRemoteError: NET/IB : Got completion from peer 10.0.0.7<42221> with error 12, opcode 0, len 0, "
            "vendor err 129",
            True,
        ),
        ("terminate called\n  what():  bad_alloc", "uncaught C++ exception: bad_alloc", False),
    ],
)
def test_errors_of_devices_in_a_ranks_output(text: str, headline: str, is_consequence: bool) -> None:
    found = device_errors.find(None, text.splitlines())
    assert found is not None
    assert (found.headline, found.is_consequence) == (headline, is_consequence)


def test_what_is_no_error_of_a_device() -> None:
    assert device_errors.find(None, ["epoch 3", "loss 0.2"]) is None
    shown = [line for line in TIMEOUT.splitlines() if not device_errors.is_noise(line)]
    assert [
        line for line in shown if "frame #" in line or "most recent call" in line or line.startswith("terminate")
    ] == []
    assert len(shown) == 3
