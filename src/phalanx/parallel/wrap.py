"""`data_parallel`: wraps a model for several processes or devices."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import argparser
from phalanx import world as worlds
from phalanx.devices import accelerator
from phalanx.errors import UsageError
from phalanx.parallel.alone import Alone, OneProcess
from phalanx.parallel.batchnorm import synchronise
from phalanx.parallel.ddp import Parallel, check_compression
from phalanx.parallel.replicas import GpuReplicas, Replicas, default_count
from phalanx.parallel.split import Device, split

Devices = int | Sequence[Device] | None

_MODES = ("ddp", "dp", "replicate", "split")
_OURS = {
    "find_unused_parameters": "find_unused",
    "device_ids": "devices with mode='replicate' or 'split'; with 'ddp' it follows from the model",
    "output_device": "nothing: the output is on the model's device",
}
"""Arguments of DistributedDataParallel that are given in another way here."""


def data_parallel(
    model: nn.Module,
    mode: str = "ddp",
    *,
    sync_batchnorm: bool = False,
    compress: str | None = None,
    find_unused: bool = False,
    static_graph: bool = False,
    devices: Devices = None,
    parts: Mapping[str, Device] | None = None,
    **ddp_options: Any,
) -> Parallel | OneProcess:
    """Wraps a model, which is on its device already, so that all ranks train it together.

    In a world of one the result has the same interface, so the same script runs alone. State dicts have the model's
    own names, and load with and without the prefix ``module.``.

    Args:
        mode: ``ddp``: one replica a process, torch's DistributedDataParallel. ``dp``: one process, several replicas
            in threads; slower, for comparison. ``replicate``: that in each process, and DDP between them. ``split``:
            the parts of the model on several devices of this process, and DDP between the processes.
        sync_batchnorm: BatchNorm layers take their statistics from the batches of all ranks.
        compress: how gradients travel: ``bf16``, ``fp16``, ``powersgd``, or as they are.
        find_unused: some parameters get no gradient in some steps. Costs a walk through the graph at each step.
        static_graph: every step uses the same parameters in the same way; torch then plans ahead.
        devices: ``dp``, ``replicate``: the number of replicas, or the GPUs. ``split``: the devices for the layers of
            an nn.Sequential, which get equal shares of its bytes as far as possible.
        parts: ``split``: from the names of submodules to their devices.
        ddp_options: further arguments of DistributedDataParallel, such as ``bucket_cap_mb`` or ``process_group``.
    """
    if mode not in _MODES:
        raise UsageError(f"mode={mode!r} is unknown; there are {', '.join(map(repr, _MODES))}.")
    switches = {"compress": compress, "find_unused": find_unused, "static_graph": static_graph, **ddp_options}
    _check_switches(mode, switches, sync_batchnorm, devices, parts)
    check_compression(compress)
    _check_options(ddp_options)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {argparser.shown(model)}; give an nn.Module.")
    if isinstance(model, DistributedDataParallel | OneProcess):
        raise UsageError("the model is wrapped already; give data_parallel the model inside, model.module.")
    sharded = next((name for name, parameter in model.named_parameters() if hasattr(parameter, "to_local")), None)
    if sharded is not None:
        raise UsageError(
            f"parameter {sharded!r} is a DTensor: the model is sharded already, by fully_shard or parallelize_module, "
            "and data_parallel keeps whole replicas; use the model as it is."
        )
    group = _Group.find(ddp_options.get("process_group"))
    if mode == "dp" and group.size > 1:
        raise UsageError(
            f"mode='dp' is for one process, and this is rank {group.rank} of {group.size}; use 'ddp', or 'replicate' "
            "for several replicas in each process."
        )
    if sync_batchnorm and group.size > 1:
        model = synchronise(model, _type(model), ddp_options.get("process_group"))
    if mode == "split":
        model = split(model, parts, devices)
    else:
        group.check(model)
    if mode in ("dp", "replicate"):
        model = _replicated(model, devices, group)
    options = {"find_unused_parameters": find_unused, "static_graph": static_graph, **ddp_options}
    if mode == "ddp":
        options["device_ids"] = _device_ids(model)
    # The weights are made. From here on each rank has random numbers of its own, for dropout and the data.
    worlds.diverge()
    if group.size > 1:
        return Parallel(model, compress=compress, **options)
    return model if isinstance(model, OneProcess) else Alone(model)


@dataclass(frozen=True)
class _Group:
    """The processes that train the model together, as this one sees them."""

    rank: int
    size: int
    device: torch.device | None
    """None when px.init was not called, so the script has not chosen one."""

    @staticmethod
    def find(group: dist.ProcessGroup | None) -> _Group:
        if worlds._current is None and not dist.is_initialized():
            world = worlds.current()  # an error if this is one of several processes and has not joined
            return _Group(world.rank, world.size, None)
        device = worlds._current.device if worlds._current is not None else None
        return _Group(dist.get_rank(), dist.get_world_size(group), device)

    def check(self, model: nn.Module) -> None:
        """Checks that the model is on this rank's device: all ranks leave it on the first GPU by mistake."""
        found = _devices(model)
        if self.size > 1 and not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"no parameter of the {type(model).__name__} wants a gradient, so the ranks have nothing to average; "
                "use the model as it is."
            )
        if self.device is None or not accelerator.serves(self.device) or len(found) != 1:
            return
        (device,) = found
        if (device.type, device.index or 0) != (self.device.type, self.device.index or 0):
            raise UsageError(
                f"the model is on {device}, but the device of rank {self.rank} is {self.device}; move it there with "
                "model.to(world.device), or join with px.init(device=…)."
            )


def _devices(model: nn.Module) -> set[torch.device]:
    return {parameter.device for parameter in model.parameters()}


def _type(model: nn.Module) -> str:
    return next(iter(_devices(model)), torch.device("cpu")).type


def _device_ids(model: nn.Module) -> list[torch.device] | None:
    """Returns the one GPU of the model; None on CPUs and for a model on several GPUs, as DDP expects."""
    found = _devices(model)
    return list(found) if len(found) == 1 and _type(model) != "cpu" else None


def _replicated(model: nn.Module, devices: Devices, group: _Group) -> OneProcess:
    if _type(model) == "cpu":
        return Replicas(model, _count(devices))
    if devices is None and group.size > 1:
        raise UsageError(
            f"mode='replicate' needs the GPUs of rank {group.rank}: give devices=[…], beginning with the model's own."
        )
    gpus = list(range(devices)) if isinstance(devices, int) else devices
    return GpuReplicas(model, None if gpus is None else [torch.device(_type(model), _index(gpu)) for gpu in gpus])


def _index(gpu: Device) -> int:
    return gpu if isinstance(gpu, int) else argparser.device(gpu).index or 0


def _count(devices: Devices) -> int:
    if devices is None:
        return default_count()
    count = devices if isinstance(devices, int) else len(devices)
    if not isinstance(devices, int) and any(argparser.device(each).type != "cpu" for each in devices):
        raise UsageError(f"devices is {list(devices)}, but the model is on the CPU; move it to the first of them.")
    if count < 1:
        raise UsageError(f"devices is {devices!r}; give the number of replicas, from 1.")
    return count


# ---- arguments that do not go together


def _check_switches(
    mode: str,
    switches: Mapping[str, object],
    sync_batchnorm: bool,
    devices: Devices,
    parts: Mapping[str, Device] | None,
) -> None:
    given = [name for name, value in switches.items() if value]
    if mode == "dp" and given:
        raise UsageError(f"mode='dp' has no use for {', '.join(given)}: there is one process; leave it out.")
    if mode in ("dp", "replicate") and sync_batchnorm:
        raise UsageError(f"sync_batchnorm works with one replica a process, not with mode={mode!r}; use 'ddp'.")
    if mode == "ddp" and devices is not None:
        raise UsageError("mode='ddp' takes the device from the model; devices is for 'dp', 'replicate' and 'split'.")
    if mode != "split" and parts is not None:
        raise UsageError(f"parts is for mode='split', and the mode is {mode!r}.")
    if parts is not None and not isinstance(parts, Mapping):
        raise UsageError(
            f"parts is {argparser.shown(parts)}; give the devices by the names of submodules, {{'head': 'cuda:1'}}."
        )
    if not isinstance(devices, Sequence | None) or isinstance(devices, str):
        argparser.whole_number("devices", devices)
    if mode == "split" and (parts is None) == (devices is None):
        raise UsageError("mode='split' takes either parts={…} or, for an nn.Sequential, devices=[…].")


def _check_options(options: Mapping[str, object]) -> None:
    """Checks them also in a world of one: a mistake should show before the script runs on many machines."""
    known = set(inspect.signature(DistributedDataParallel.__init__).parameters) - {"self", "module"}
    for name in options:
        if name in _OURS:
            raise UsageError(f"{name} is DistributedDataParallel's; here, give {_OURS[name]}.")
        if name not in known:
            raise UsageError(f"{name} is no argument of data_parallel, nor of torch's DistributedDataParallel.")
