"""The state of NVIDIA GPUs: memory, utilisation, power, temperature, throttling and processes, read through NVML.

It needs no torch and creates no CUDA context. A call to NVML can hang when a GPU has fallen off the bus, so all calls
run in a thread that is abandoned after a limit.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

from phalanx.messages import Record

_LIBRARY = "libnvidia-ml.so.1"
_LIMIT = 2.0
"""Seconds for all readings together."""
_SUCCESS = 0
_GPU_TEMPERATURE = 0
_UNCORRECTED, _SINCE_BOOT = 1, 0
_MOST_PROCESSES = 64
_THROTTLED_BY = {
    0x04: "its power limit",
    0x08: "the hardware",
    0x20: "its temperature",
    0x40: "its temperature",
    0x80: "the power supply",
}
"""Bits of nvmlClocksEventReasons that mean less than full speed under load."""
_LITTLE_POWER = 0.5
"""Below this share of its power limit, a busy GPU may be waiting in NCCL, or for its own memory."""


class GpuState(Record, frozen=True):
    """One GPU at one moment. None: the driver does not report it."""

    index: int
    name: str
    bus: str = ""
    """Its PCI address, as the kernel's log has it."""
    memory_used: int | None = None
    memory_total: int | None = None
    utilization: int | None = None
    """Percent of the last second in which a kernel ran."""
    power: float | None = None
    power_limit: float | None = None
    temperature: int | None = None
    throttled_by: tuple[str, ...] = ()
    ecc_errors: int | None = None
    """Uncorrected ones since the driver was loaded."""
    processes: tuple[tuple[int, int], ...] = ()
    """Pid and bytes of each process that computes on it."""

    @property
    def is_busy(self) -> bool:
        return (self.utilization or 0) >= 95  # with kernels that compute, or with one of NCCL that waits

    @property
    def may_wait(self) -> bool:
        return self.is_busy and self.power is not None and self.power < _LITTLE_POWER * (self.power_limit or 0)

    def __str__(self) -> str:
        """Returns ``NVIDIA H100: 60.0 of 80.0 GiB, 100 % busy, 640 of 700 W, 41 °C``: what is known."""
        known = (
            (self.memory_used, f"{(self.memory_used or 0) / 2**30:.1f} of {(self.memory_total or 0) / 2**30:.1f} GiB"),
            (self.utilization, f"{self.utilization} % busy"),
            (self.power, f"{self.power or 0:.0f} of {self.power_limit or 0:.0f} W"),
            (self.temperature, f"{self.temperature} °C"),
            (self.throttled_by or None, f"slowed down by {' and '.join(self.throttled_by)}"),
            (self.may_wait or None, "busy at little power: it may be waiting in NCCL"),
        )
        return f"{self.name}: {', '.join(text for value, text in known if value is not None)}"


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Utilization(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def read(names: Sequence[str] | None = None, library: str = _LIBRARY, limit: float = _LIMIT) -> list[GpuState]:
    """The state of the GPUs; an empty list without NVIDIA's driver, or when it does not answer in time.

    Args:
        names: numbers or UUIDs, as CUDA_VISIBLE_DEVICES has them; None: all.
    """
    found: list[GpuState] = []
    thread = threading.Thread(target=lambda: found.extend(_read(names, library)), name="phalanx-nvml", daemon=True)
    thread.start()
    thread.join(limit)
    return [] if thread.is_alive() else found


def by_process() -> dict[int, GpuState]:
    """The GPU of each process that computes on one. In a container, the driver may not tell of the processes."""
    return {pid: state for state in read() for pid, _ in state.processes}


def _read(names: Sequence[str] | None, library: str) -> list[GpuState]:
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return []
    if nvml.nvmlInit_v2() != _SUCCESS:
        return []
    try:
        if names is None:
            count = _number(nvml, "nvmlDeviceGetCount_v2", ctypes.c_uint)
            names = [str(index) for index in range(int(count or 0))]
        handles = [(index, _handle(nvml, name)) for index, name in enumerate(names)]
        return [_state(nvml, index, handle) for index, handle in handles if handle is not None]
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: ctypes.CDLL, name: str) -> ctypes.c_void_p | None:
    handle = ctypes.c_void_p()
    by, key = ("Index_v2", ctypes.c_uint(int(name))) if name.isdigit() else ("UUID", name.encode())
    return handle if _call(nvml, f"nvmlDeviceGetHandleBy{by}", key, ctypes.byref(handle)) else None


def _state(nvml: ctypes.CDLL, index: int, handle: ctypes.c_void_p) -> GpuState:
    memory, utilization = _Memory(), _Utilization()
    has_memory = _call(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    has_utilization = _call(nvml, "nvmlDeviceGetUtilizationRates", handle, ctypes.byref(utilization))
    name = ctypes.create_string_buffer(96)
    _call(nvml, "nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
    address = ctypes.create_string_buffer(128)  # a larger structure, which begins with the address
    _call(nvml, "nvmlDeviceGetPciInfo_v3", handle, address)
    power = _number(nvml, "nvmlDeviceGetPowerUsage", ctypes.c_uint, handle)
    limit = _number(nvml, "nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint, handle)
    reasons = _number(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", ctypes.c_ulonglong, handle) or 0
    kinds = ctypes.c_int(_UNCORRECTED), ctypes.c_int(_SINCE_BOOT)
    return GpuState(
        index=index,
        name=name.value.decode(errors="replace"),
        bus=address.value.decode(errors="replace").lower().partition(".")[0],
        memory_used=memory.used if has_memory else None,
        memory_total=memory.total if has_memory else None,
        utilization=utilization.gpu if has_utilization else None,
        power=None if power is None else power / 1000,
        power_limit=None if limit is None else limit / 1000,
        temperature=_number(nvml, "nvmlDeviceGetTemperature", ctypes.c_uint, handle, ctypes.c_int(_GPU_TEMPERATURE)),
        throttled_by=tuple(dict.fromkeys(text for bit, text in _THROTTLED_BY.items() if reasons & bit)),
        ecc_errors=_number(nvml, "nvmlDeviceGetTotalEccErrors", ctypes.c_ulonglong, handle, *kinds),
        processes=_processes(nvml, handle),
    )


def _processes(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[tuple[int, int], ...]:
    count, infos = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    if not _call(nvml, "nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), infos):
        return ()
    return tuple((info.pid, info.memory) for info in infos[: count.value])


def _number(nvml: ctypes.CDLL, function: str, kind: Callable[[], object], *arguments: object) -> int | None:
    value = kind()
    found = _call(nvml, function, *arguments, ctypes.byref(value))  # type: ignore[arg-type]
    return value.value if found else None  # type: ignore[attr-defined]


def _call(nvml: ctypes.CDLL, function: str, *arguments: object) -> bool:
    """False where the driver is too old to have the function, or the GPU to support it."""
    try:
        return getattr(nvml, function)(*arguments) == _SUCCESS
    except AttributeError:
        return False
