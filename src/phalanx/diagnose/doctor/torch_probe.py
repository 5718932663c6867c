"""A process of its own that imports torch and phalanx's C library, and reports what it found.

So a torch that cannot be imported is a finding and not a traceback, one that crashes ends nothing else, and everything
else can be read meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from phalanx import messages
from phalanx.source_lines import SYS_PATH_ENTRY

_LONGEST_SECONDS = 60.0
"""More than a first import from a slow file system takes."""

_CODE = r"""
import ctypes, importlib.util, json, os, sys, time

if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # killed when its parent ends
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what a library prints is not the answer
if sys.path[0] == "":
    del sys.path[0]  # a rank has its script's directory there, not this one
sys.path.append(sys.argv[2])  # where phalanx itself was found

found = {}

def text_of(error):
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

def ask(what, question):
    try:
        question()
    except BaseException as error:
        found[what] = text_of(error)

def about_torch():
    spec = importlib.util.find_spec("torch")
    found["is_missing"] = spec is None
    found["file"] = os.path.realpath(spec.origin) if spec and spec.origin else None
    started = time.perf_counter()
    import torch
    found["seconds"] = time.perf_counter() - started
    found["version"] = str(torch.__version__)
    import torch.distributed as dist
    if dist.is_available():
        found["backends"] = list(filter(dist.is_backend_available, ("gloo", "nccl", "mpi", "xccl", "hccl")))
    found["cuda"] = torch.version.cuda or getattr(torch.version, "hip", None)

def about_numpy():
    import numpy
    found["numpy"] = numpy.__version__
    if found.get("version"):
        import torch
        torch.zeros(1).numpy()  # fails when torch was built for another numpy

def about_gpus():
    import torch
    if found["cuda"]:
        found["architectures"] = torch.cuda.get_arch_list()
        if "nccl" in found.get("backends", ()):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    device = torch.accelerator.current_accelerator()
    if not found["cuda"] and (device is None or not torch.accelerator.is_available()):
        return
    found["accelerator"] = device.type if device is not None else "cuda"
    module = torch.get_device_module(found["accelerator"])
    getattr(module, "init", int)()  # the error of a GPU that cannot be used says why
    kind = "{0.major}.{0.minor}" if torch.version.cuda else "{0.gcnArchName}" if torch.version.hip else ""
    ask_properties = getattr(module, "get_device_properties", lambda index: None)
    found["gpus"] = [
        {"name": getattr(x, "name", device.type), "bytes": getattr(x, "total_memory", 0), "capability": kind.format(x)}
        for x in map(ask_properties, range(torch.accelerator.device_count()))
    ]

def about_library():
    from phalanx import torch_compat
    found["library_problem"] = torch_compat.why_no_shm()
    if found["library_problem"] is None:
        from phalanx import shm
        found["library_problem"] = shm.why_not_here()
        found["library"] = None if found["library_problem"] else shm.describe()["shm"]

ask("problem", about_torch)
ask("numpy_problem", about_numpy)
if found.get("version") and not found.get("problem"):
    ask("cuda_problem", about_gpus)
    ask("library_problem", about_library)
json.dump(found, answer)
answer.close()
os._exit(0)  # without the seconds that torch may take to shut down
"""


@dataclass(frozen=True)
class Gpu:
    name: str
    bytes: int
    """0: not known."""
    capability: str = ""
    """``8.6`` of NVIDIA's, ``gfx90a:sramecc+`` of AMD's; empty for others."""


@dataclass(frozen=True)
class Torch:
    """The answer of the process: it prints these fields as JSON."""

    version: str | None = None
    file: str | None = None
    """The file that was, or would be, imported."""
    problem: str | None = None
    """Why it cannot be imported or used."""
    is_missing: bool = False
    seconds: float = 0.0
    """Seconds that the import took."""
    numpy: str | None = None
    numpy_problem: str | None = None
    backends: tuple[str, ...] = ()
    """Those of gloo, nccl, mpi, xccl and hccl that it has."""
    cuda: str | None = None
    """The version of CUDA or ROCm that it was built for."""
    cuda_problem: str | None = None
    gpus: tuple[Gpu, ...] = ()
    accelerator: str | None = None
    """The type of the devices, such as cuda or xpu."""
    architectures: tuple[str, ...] = ()
    """What torch has code for: ``sm_80``, ``gfx90a``."""
    nccl: str | None = None
    library: str | None = None
    """Version and instructions of phalanx's C library."""
    library_problem: str | None = None


@contextlib.contextmanager
def started(environ: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Starts the process, and kills it at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE, str(os.getpid()), SYS_PATH_ENTRY],
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in a driver does not die
            process.communicate(timeout=1)


def answer(process: subprocess.Popen[str]) -> Torch:
    try:
        out, err = process.communicate(timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired:
        return Torch(problem=f"importing it has not finished within {_LONGEST_SECONDS:g} s")
    return parse(out, err, process.returncode)


def parse(out: str, err: str, code: int) -> Torch:
    """Reads the answer of the process, or how it ended without one."""
    if code == 0 and out:
        return messages.decode(out, Torch, "the probe of torch")
    last = "".join(f" ({line})" for line in err.strip().splitlines()[-1:])
    names = {int(number): number.name for number in signal.Signals}
    how = f"signal {names.get(-code, -code)}" if code < 0 else f"exit code {code}"
    return Torch(problem=f"importing it ended the interpreter with {how}{last}")
