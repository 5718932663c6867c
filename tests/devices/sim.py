"""An asynchronous accelerator in Python, for machines without one: importing this adds the device "sim" to torch.

The host puts kernels into a queue and runs ahead; one thread runs them in order, on tensors of the CPU. As on a GPU, a
failed kernel is noticed later, and every call after it fails too; memory can be exhausted; a kernel can be slow, or
stuck. What a real device has and this one has not: a second index (torch's interface for devices in Python makes every
tensor on index 0), strides that torch can see, pinned memory, and of `torch.accelerator` what acts on a device
(synchronize, memory): `torch.sim` has that.

A tensor of "sim" has an empty storage; its `Buffer` hangs on the storage and holds the values. Views share the memory
of the CPU's tensors, so that aliasing is right.
"""

# torch's stubs lack torch._C._acc.
# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import atexit
import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

NAME = "sim"
_TO_END = 1.0
"""Seconds that kernels in the queue get when the process ends."""
_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1
Kernel = Callable[[], object]


class Buffer:
    """The values of a tensor, and the memory they take on the device."""

    def __init__(self, size: int, value: Tensor | None = None) -> None:
        self.value = value
        self._size, self._device = 0, device  # at the interpreter's end, the name is gone before the last tensor
        device.allocate(size)
        self._size = size

    def __del__(self) -> None:
        self._device.allocated -= self._size


class Stream(torch.Stream):
    """A queue of kernels, which one thread runs in order."""

    _count = 0

    def __new__(cls, device: object = None, priority: int = 0) -> Stream:
        number, cls._count = cls._count, cls._count + 1
        return super().__new__(cls, stream_id=number, device_index=0, device_type=_DEVICE_TYPE)

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self._running = threading.Event()
        self._running.set()
        self._queue: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def enqueue(self, kernel: Kernel) -> None:
        """Without a check for errors, as events are recorded."""
        if self._thread is None:  # at the first use: a process that forks has no threads
            self._thread = threading.Thread(target=self._run, name="sim-stream", daemon=True)
            self._thread.start()
            atexit.register(self._end)
        self._queue.put(kernel)

    def _end(self) -> None:
        """Ends the thread unless a kernel is stuck: one that frees tensors while Python ends aborts the process."""
        assert self._thread is not None
        self._queue.put(sys.exit)
        self._thread.join(_TO_END)

    def _run(self) -> None:
        while True:
            kernel = self._queue.get()
            self._running.wait()
            try:
                kernel()
            except Exception as error:  # noqa: BLE001 (a device keeps its first error, whatever it was)
                device.error = device.error or str(error)
            device.completed += 1

    def synchronize(self) -> None:
        if self._thread is not None:
            done = threading.Event()
            self.enqueue(done.set)
            done.wait()
        device.check()

    def wait_event(self, event: Event) -> None:
        passed = event.passed  # the record before this call counts, as in CUDA
        self.enqueue(passed.wait)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def hold(self) -> None:
        """No kernel runs until `release`, as if one were stuck."""
        self._running.clear()

    def release(self) -> None:
        self._running.set()


class Device:
    """The streams, and what a test can do to them."""

    def __init__(self) -> None:
        self.delay = 0.0
        """Seconds that each kernel takes beside its arithmetic."""
        self.memory = 1 << 40
        self.allocated = 0
        self.launched = self.completed = self.synchronized = 0
        self.error: str | None = None
        self.generator = torch.Generator()
        self.default = Stream()
        self.streams = [self.default]
        """All that were used."""
        self.shared: list[tuple[Buffer, int]] = []
        """The memory that another stream uses than the one it was made on: what `record_stream` was told."""
        self._current = threading.local()

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        return getattr(self._current, "stream", self.default)

    @current.setter
    def current(self, stream: Stream) -> None:
        if stream not in self.streams:
            self.streams.append(stream)
        self._current.stream = stream

    def launch(self, kernel: Kernel) -> None:
        self.check()
        self.launched += 1
        delay = self.delay
        self.current.enqueue(kernel if delay == 0 else lambda: (time.sleep(delay), kernel()))

    def synchronize(self) -> None:
        """Waits for all streams."""
        self.synchronized += 1
        for stream in self.streams:
            stream.synchronize()

    def check(self) -> None:
        if self.error is not None:
            raise torch.AcceleratorError(f"SIM error: {self.error}")

    def allocate(self, size: int) -> None:
        if self.allocated + size > self.memory:
            free = self.memory - self.allocated
            raise torch.OutOfMemoryError(f"SIM out of memory. Tried to allocate {size} bytes; {free} bytes are free.")
        self.allocated += size

    def fail(self, message: str) -> None:
        """Puts a kernel into the queue that fails, as an illegal access does: later, and for good."""

        def kernel() -> None:
            raise RuntimeError(message)

        self.launch(kernel)

    def hold(self) -> None:
        """No kernel of the default stream runs until `release`, as if one were stuck."""
        self.default.hold()

    def release(self) -> None:
        self.default.release()


device = Device()


class Event:
    """As torch.cuda.Event: it has happened when the queue has come to it."""

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.passed = threading.Event()
        self.passed.set()
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.passed = passed = threading.Event()

        def kernel() -> None:
            self._time = time.perf_counter()
            passed.set()

        (stream or device.current).enqueue(kernel)

    def query(self) -> bool:
        device.check()
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()
        device.check()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or device.current).wait_event(self)

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) * 1000.0


class DeviceModule:
    """What `torch.get_device_module("sim")` answers."""

    Event, Stream = Event, Stream
    set_to: list[int] = []  # noqa: RUF012 (one module, one list)
    """Every device that somebody has chosen."""

    def __init__(self) -> None:
        self._current = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return device.launched > 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return self._current

    def set_device(self, index: int | str | torch.device) -> None:
        self._current = index if isinstance(index, int) else torch.device(index).index or 0
        self.set_to.append(self._current)

    def synchronize(self, index: object = None) -> None:
        device.synchronize()

    def current_stream(self, index: object = None) -> Stream:
        return device.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, device.current = device.current, stream
        try:
            yield
        finally:
            device.current = before

    def manual_seed(self, seed: int) -> None:
        device.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, index: object = None) -> Tensor:
        return device.generator.get_state()

    def set_rng_state(self, state: Tensor, index: object = None) -> None:
        device.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def mem_get_info(self, index: object = None) -> tuple[int, int]:
        return device.memory - device.allocated, device.memory

    def memory_allocated(self, index: object = None) -> int:
        return device.allocated


class _Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return device.launched > 0


def is_sim(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def buffer(tensor: Tensor) -> Buffer:
    """The values of a tensor of the device. To be read by a kernel."""
    return tensor.untyped_storage().buffer


def values(of: Buffer) -> Tensor:
    assert of.value is not None, "a kernel that comes earlier has not run"
    return of.value


def _new(size: Sequence[int], dtype: torch.dtype, value: Tensor | None = None, *, is_view: bool = False) -> Tensor:
    tensor = torch._C._acc.create_empty_tensor(tuple(size), dtype)
    count = 0 if is_view else tensor.numel() * dtype.itemsize
    tensor.untyped_storage().buffer = Buffer(count, value)
    return tensor


def _as_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and (is_sim(value) or value.dim()):
        return torch.empty(value.size(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) and value.type == NAME else value


def _as_cpu(value: Any) -> Any:
    if isinstance(value, Buffer):
        return values(value)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value


def _written(op: Any, args: Any, kwargs: Any) -> list[Any]:
    arguments = enumerate(op._schema.arguments)
    found = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [value for value in found if value is not None]


def run_later(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation of torch: the shapes of its results come from the meta device now, the values by a kernel later."""
    returns = op._schema.returns
    draws = any(argument.name == "generator" for argument in op._schema.arguments)
    flat, spec = tree_flatten((args, kwargs))
    flat = [buffer(value) if is_sim(value) else value for value in flat]
    # As on a GPU, the generator advances when a kernel is launched, not when it runs.
    seed = int(torch.randint(1 << 62, (), generator=device.generator)) if draws else 0
    outputs: list[Buffer | None] = []
    if all(
        one.alias_info is not None and one.alias_info.is_write for one in returns
    ):  # in place, or nothing is returned
        written = _written(op, args, kwargs)
        result = None if not returns else written[0] if len(returns) == 1 else tuple(written)
    else:
        is_view = any(one.alias_info is not None for one in returns)

        def wrap(value: Any) -> Any:
            new = _new(value.size(), value.dtype, is_view=is_view) if isinstance(value, Tensor) else value
            outputs.append(buffer(new) if isinstance(new, Tensor) else None)
            return new

        result = tree_map(wrap, op(*tree_map(_as_meta, args), **tree_map(_as_meta, kwargs)))

    def kernel() -> None:
        cpu_args, cpu_kwargs = tree_unflatten([_as_cpu(value) for value in flat], spec)
        if draws and cpu_kwargs.get("generator") is None:
            cpu_kwargs["generator"] = torch.Generator().manual_seed(seed)
        # Every tensor looks contiguous from outside: contiguous() does nothing, and the view that follows is legal.
        run = torch.ops.aten.reshape.default if op is torch.ops.aten.view.default else op
        with torch.no_grad():
            found = run(*cpu_args, **cpu_kwargs)
        for output, value in zip(outputs, tree_flatten(found)[0], strict=False):
            if output is not None:
                output.value = value

    device.launch(kernel)
    return result


def _empty(size: Sequence[int], *_: object, dtype: torch.dtype | None = None, **__: object) -> Tensor:
    dtype = dtype or torch.get_default_dtype()
    return _new(size, dtype, torch.empty(tuple(size), dtype=dtype))


def _resize(tensor: Tensor, size: Sequence[int], memory_format: object = None) -> Tensor:
    """The elements that there are stay, as in torch. Losses are made in the size of their input, and resized."""
    old, new = buffer(tensor), _new(size, tensor.dtype, torch.zeros(tuple(size), dtype=tensor.dtype))
    to, count = buffer(new), min(tensor.numel(), new.numel())
    device.launch(lambda: values(to).view(-1)[:count].copy_(values(old).reshape(-1)[:count]))
    tensor.data = new
    return tensor


def _reshape(tensor: Tensor, size: Sequence[int], *_: object) -> Tensor:
    """A view where the values allow it, and else a copy: contiguous() before it has done nothing."""
    size = torch.empty(tensor.size(), device="meta").view(size).size()  # without a -1
    result = _new(size, tensor.dtype, is_view=True)
    source, to = buffer(tensor), buffer(result)

    def kernel() -> None:
        to.value = values(source).reshape(size)

    device.launch(kernel)
    return result


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if is_sim(target):
        to = buffer(target)
        value = buffer(source) if is_sim(source) else source.clone()  # as CUDA stages what is not pinned
        device.launch(lambda: values(to).copy_(_as_cpu(value)))
        return target
    of = buffer(source)
    device.launch(lambda: target.copy_(values(of)))
    if not non_blocking:
        device.current.synchronize()
    return target


def _item(tensor: Tensor) -> object:
    of = buffer(tensor)
    device.current.synchronize()
    return values(of).item()


def _dropout(tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """From the device's own generator; the CPU's operation would draw from the one of the host."""
    kept = torch.empty_like(tensor).bernoulli_(1 - p) if train else torch.ones_like(tensor)
    return tensor * kept / (1 - p if train else 1), kept.bool()


def _record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    device.shared.append((buffer(tensor), stream.stream_id))


def _in_lower_precision(op: Any) -> Callable[..., Any]:
    """What autocast does to a matrix product."""

    def call(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def cast(value: Any) -> Any:
            return value.to(dtype) if is_sim(value) and value.dtype == torch.float32 else value

        with torch.autocast(NAME, enabled=False):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return call


backend_registration._setup_privateuseone_for_python_backend(
    NAME, backend_module=DeviceModule(), hook=_Hooks(), device_guard=_Guard()
)
_library = torch.library.Library("_", "IMPL")
_library.fallback(run_later, "PrivateUse1")
for _name, _function in {
    "aten::empty.memory_format": _empty,
    "aten::empty_strided": _empty,
    "aten::_copy_from": _copy_from,
    "aten::_local_scalar_dense": _item,
    "aten::_reshape_alias": _reshape,
    "aten::native_dropout": _dropout,
    "aten::record_stream": _record_stream,
    "aten::resize_": _resize,
    "aten::view": _reshape,
}.items():
    torch.library.impl(_name, "PrivateUse1")(_function)
for _name in ("mse_loss", "smooth_l1_loss"):  # torch would compute these in the size of their input, and resize
    torch.library.impl(f"aten::{_name}", "PrivateUse1")(partial(run_later, getattr(torch.ops.aten, _name).default))
# torch would compute these from strides, and all tensors of "sim" have those of contiguous ones. Their values do not.
for _name in """select.int slice.Tensor squeeze squeeze.dim squeeze.dims unsqueeze transpose.int permute t expand
    split.Tensor split_with_sizes unbind.int diagonal unfold""".split():
    _packet, _, _overload = _name.partition(".")
    _op = getattr(getattr(torch.ops.aten, _packet), _overload or "default")
    torch.library.impl(f"aten::{_name}", "PrivateUse1")(partial(run_later, _op))
_library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for _name in ("linear", "addmm", "mm", "matmul", "bmm", "baddbmm"):
    torch.library.impl(f"aten::{_name}", "AutocastPrivateUse1")(_in_lower_precision(getattr(torch.ops.aten, _name)))
