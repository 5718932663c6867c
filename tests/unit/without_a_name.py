"""Run as a program: each private name of torch missing in turn, in forks of one process that has torch loaded.

    without_a_name.py DIRECTORY

``found.json`` there says for each name, and for nothing missing in each file of torch_compat: the traceback that what
depends on it ended with, the events of the rank, which replacements are in place and which names were found missing.
For us a name is gone when it is looked for under another one; torch itself still needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader

from phalanx.errors import JoinError
from phalanx.torch_compat import names

SECOND = timedelta(seconds=1)
WARM = """
    asyncio psutil torch.nn.parallel torch.distributed.elastic.rendezvous.dynamic_rendezvous
    phalanx.world phalanx.recorder
    phalanx.checkpoint.copy_gate phalanx.checkpoint.sharding phalanx.checkpoint.state phalanx.checkpoint.storage.values
    phalanx.launch.process.fresh_modules phalanx.launch.multinode.elastic
    phalanx.launch.process.exit_report phalanx.parallel.replicas
""".split()
"""What looks for no name when it is imported."""


# ---- what depends on the names, by the file they are in


def rank() -> None:
    """What a rank of `phalanx run` does with torch."""
    from phalanx import world
    from phalanx.launch.process import torch_setup
    from phalanx.recorder import flight_reader

    torch_setup.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _seen["group"] = type(dist.group.WORLD).__name__
    dist.all_reduce(torch.ones(3))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()
    c10d._set_pg_timeout(SECOND, dist.group.WORLD)
    dist.monitored_barrier()
    flight_reader.group_progress()
    flight_reader.ranks_of("0")
    weight = torch.ones(2, requires_grad=True)
    weight.sum().backward()
    torch.save(weight, io.BytesIO())
    items: Any = [1, 2]
    next(iter(DataLoader(items)))
    assert world.current().size == 1
    dist.destroy_process_group()


def records() -> None:
    from phalanx.recorder import flight_reader

    rank()
    flight_reader.entries(stacks=True)


def group() -> None:
    from phalanx import world
    from phalanx.recorder import ddp_models
    from phalanx.shm.hierarchical.gloo_groups import GlooMessage

    rank()
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    model: Any = nn.Linear(1, 1)
    model.process_group = dist.group.WORLD
    ddp_models._models.add(model)
    ddp_models._keep_groups()
    gone = SimpleNamespace(device=torch.device("cuda"))
    world._destroy(gone, in_order=False)  # type: ignore[arg-type]
    with contextlib.suppress(RuntimeError):  # torch's own: it has received nothing
        GlooMessage._source_rank(SimpleNamespace(_work=dist.Work()))  # type: ignore[arg-type]


def connections() -> None:
    from phalanx import backends
    from phalanx.torch_compat import c10d as compat

    if backends._why_not_here() is None:
        compat.set_gloo_timeout(compat.new_gloo(dist.HashStore(), 0, 1, SECOND, "127.0.0.1"), SECOND)


def compiled() -> None:
    from phalanx.checkpoint.state import unwrapped
    from phalanx.launch.process.fresh_modules import FreshModules
    from phalanx.parallel import ddp
    from phalanx.torch_compat import dynamo

    rank()
    importlib.reload(ddp)
    sys.modules.setdefault("torch._dynamo", SimpleNamespace(__spec__=None, callback=None))  # type: ignore[arg-type]
    dynamo.when_compiling(print, print)
    os.environ["TORCH_LOGS"] = "-dynamo"
    FreshModules([], frozenset(), {}).apply_settings("torch")
    model = nn.Linear(1, 1)
    kind = type("OptimizedModule", (nn.Module,), {})
    around = kind()
    around._orig_mod = model
    assert unwrapped(around) in (model, around)


def loader() -> None:
    from phalanx.launch.process import exit_report

    rank()
    items: Any = [1, 2]
    self: Any = iter(DataLoader(items, num_workers=1, timeout=60))
    exit_report.ignore_loader_sigchld()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = self._workers[0].pid
    os.kill(pid, signal.SIGKILL)
    try:
        raise ConnectionResetError
    except ConnectionResetError as error:
        reason = str(exit_report.real_reason(_in_method(self, error)))
    assert reason in ("", f"DataLoader worker (pid {pid}) is killed by signal: Killed. ")
    self._shutdown_workers()


def _in_method(self: Any, error: Exception) -> Exception:
    """As if it had been raised in a method of the object."""
    try:
        raise error
    except Exception as found:  # noqa: BLE001
        return found


def gradients() -> None:
    from phalanx.launch.process import exit_report

    rank()
    logged = SimpleNamespace(strs_map={}, ints_map={"num_parameter_tensors": 2})
    logger = SimpleNamespace(_get_ddp_logging_data=lambda: logged)
    wrapper = SimpleNamespace(module=nn.Linear(1, 1), parameters_to_ignore=set(), logger=logger)
    assert exit_report._parameter_names(wrapper) in (["weight", "bias"], [])


def model() -> None:
    from phalanx.checkpoint.copy_gate import CopyGate
    from phalanx.checkpoint.state import load_model
    from phalanx.checkpoint.storage.values import encode
    from phalanx.parallel.replicas import Replicas

    layer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    load_model(layer, layer.state_dict())
    encode(layer[1].state_dict(), (), lambda *_: ("tensor", ""))
    wrapped = Replicas(layer.eval(), 2)
    inputs = torch.ones(4, 2)
    assert torch.equal(wrapped(inputs), layer(inputs))
    load_model(wrapped, wrapped.state_dict())
    gate = CopyGate()
    gate.shut()
    _replacements["torch.nn.Module.load_state_dict"] = _is_ours(nn.Module.load_state_dict)
    gate.open()
    assert not _is_ours(nn.Module.load_state_dict)
    with contextlib.suppress(KeyError):
        Replicas(_Failing(), 2)(inputs)


class _Failing(nn.Module):
    def forward(self, _: torch.Tensor) -> None:
        raise KeyError("too large")


def tensor() -> None:
    from phalanx.checkpoint.sharding import ShardBuffer
    from phalanx.launch.process import fresh_modules
    from phalanx.shm.node import tensors
    from phalanx.torch_compat import tensors as pytree

    os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:64"
    fresh_modules._set_allocator("PYTORCH_ALLOC_CONF")
    ShardBuffer().take([])
    assert tensors.contiguous(torch.ones(4, 4).t()).is_contiguous()
    tree = {"a": [torch.ones(1), 2], "b": (torch.ones(1),)}
    doubled = pytree.tree_map_only(torch.Tensor, lambda each: each * 2, tree)
    assert doubled == {"a": [torch.full((1,), 2.0), 2], "b": (torch.full((1,), 2.0),)}
    assert (
        pytree.tree_map_where(lambda each: each == 2 or isinstance(each, tuple), repr, tree)["b"] == "(tensor([1.]),)"
    )
    leaves, shape = pytree.tree_flatten(tree)
    assert len(leaves) == 3
    assert pytree.tree_unflatten(leaves, shape) == tree
    assert shape == pytree.tree_flatten(doubled)[1]


def nodes() -> None:
    from phalanx.launch.multinode.elastic import ElasticRendezvous
    from phalanx.launch.multinode.protocol import NodeInfo, Terms

    own = NodeInfo(-1, "a", "127.0.0.1", 1, 1, "1:2", 0, "x", "2", "1", "")
    refusal = ""
    try:
        rendezvous = ElasticRendezvous(dist.HashStore(), own, Terms(1, 2, 1.0, 1.0), lambda *_: None, SimpleQueue())
        rendezvous._backend.read()
    except JoinError as error:  # the run was asked for this very feature
        refusal = str(error)
    assert not refusal or refusal.startswith("the number of nodes cannot change: this torch has no ")


def process_groups() -> None:
    group()
    connections()
    nodes()


def modules() -> None:
    gradients()
    model()


DEPENDS: dict[str, Callable[[], None]] = {
    "c10d": process_groups,
    "dataloader": loader,
    "dynamo": compiled,
    "flight_recorder": records,
    "nn": modules,
    "tensors": tensor,
}


# ---- one fork


_replacements: dict[str, bool] = {}
_seen: dict[str, str] = {}


def _is_ours(function: Any) -> bool:
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and "/phalanx/" in code.co_filename:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def in_fork(area: str, missing: names.Name | None, file: Path) -> None:
    """Runs what depends on the names of one file, and writes down what came of it."""
    directory = file.with_suffix("")
    directory.mkdir()
    paths = {name: str(name) for of in names.by_area().values() for name in of if isinstance(name, names.Replaced)}
    real = {label: name.path for name, label in paths.items()}
    if missing is not None:
        missing.path += "_gone"
    events = directory / "rank-0.events.jsonl"
    names.report_to(directory, 0)
    error = None
    try:
        DEPENDS[area]()
    except BaseException:  # noqa: BLE001 (whatever it is, it is what the test looks for)
        error = traceback.format_exc()
    for label, path in real.items():
        _replacements.setdefault(label, _is_ours(getattr(*names._place(path))))
    found = {
        "error": error,
        "group": _seen.get("group"),
        "events": [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else [],
        "on": [label for label, is_ours in _replacements.items() if is_ours],
        "off": [str(name) for name in names._missing if isinstance(name, names.Replaced)],
    }
    file.write_text(json.dumps(found))


def main(directory: Path) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "PHALANX_BACKEND": "auto"}
    os.environ.update(place)
    native: Any = sys.modules["torch._C._distributed_c10d"]
    for kind in ("", "_json"):  # a torch with nccl has these too; nothing was recorded there
        setattr(native, f"_dump_nccl_trace{kind}", getattr(native, f"_dump_fr_trace{kind}"))
    dist.is_nccl_available = lambda: True
    for module in WARM:
        importlib.import_module(module)
    found = {}
    for number, (area, missing) in enumerate(
        (area, missing) for area, of in names.by_area().items() for missing in (None, *of)
    ):
        file = directory / f"{number}.json"
        pid = os.fork()
        if pid == 0:
            try:
                in_fork(area, missing, file)
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(pid, 0)
        label = f"nothing of {area}" if missing is None else str(missing)
        found[label] = json.loads(file.read_text()) if file.exists() else {"error": "it ended before it could say how"}
    (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
