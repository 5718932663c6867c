"""Lets tests that ask for GPUs run on the CPU: most of the suite's tests of DDP do, and few of them need one.

What asks for a GPU gets the CPU instead. The few tests that do need a real one fail, on every backend alike.
"""

# The stubs do not let a function of torch be replaced.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode


def _on_cpu(given: Any) -> Any:
    """A device, or whatever else is given in such a place, with the CPU for every GPU; a number is a GPU's."""
    is_number = isinstance(given, int) and not isinstance(given, bool)
    return "cpu" if is_number or str(given).startswith("cuda") else given


class _Redirect(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in named:
            named["device"] = _on_cpu(named["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        return func(*args, **named)


def install(common: Any, gpus: int) -> None:
    """For the rest of this process; ``common`` is the module with the suite's checks."""
    common.TEST_CUDA = True
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: gpus
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    Module.cuda = lambda self, *_, **__: self
    Module.to = _with_cpu(Module.to)
    DistributedDataParallel.__init__ = _without_devices(DistributedDataParallel.__init__)
    _Redirect().__enter__()


def _with_cpu(plain: Callable[..., Module]) -> Callable[..., Module]:
    @functools.wraps(plain)
    def to(self: Module, *args: Any, **kwargs: Any) -> Module:
        return plain(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()})

    return to


def _without_devices(plain: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: Any, module: Module, device_ids: Any = None, output_device: Any = None, *args: Any, **named: Any):
        plain(self, module, None, None, *args, **named)

    return init
