"""Random calls of the Python API, in a process of their own."""

from __future__ import annotations

import os
import random
import signal
import traceback
from typing import Any

LONGEST = 20
VALUES = (
    None,
    0,
    1,
    -1,
    2,
    10**30,
    1.5,
    float("nan"),
    "",
    "x",
    "0",
    b"x",
    [],
    [1, 2],
    {},
    {"a": 1},
    (),
    {1},
    print,
    object,
)


def make(rank: int, seed: int, count: int, directory: str) -> tuple[int, list[str]]:
    """How many calls were made, and those that did not answer with a result or a sentence."""
    os.chdir(directory)
    for name in [
        name for name in os.environ if name in ("RANK", "WORLD_SIZE") or name.startswith(("LOCAL_", "PHALANX"))
    ]:
        del os.environ[name]
    signal.signal(signal.SIGALRM, _too_long)
    rng = random.Random(seed)
    found = [problem for problem in (_call(rng) for _ in range(count)) if problem is not None]
    return count, found


def _too_long(*_: Any) -> None:
    raise AssertionError(f"still busy after {LONGEST} s")


def _call(rng: random.Random) -> str | None:
    import torch.distributed as dist

    import phalanx as px

    name, function, arguments = _choose(rng)
    signal.alarm(LONGEST)
    try:
        result = function(**arguments)
        if hasattr(result, "close"):
            result.close()
    except px.PhalanxError as error:
        return None if "\n" not in str(error) else f"{name}({arguments}): {error}"
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        if any("/phalanx/" in file and "tests" not in file for file in files):
            return f"{name}({arguments}): {''.join(traceback.format_exception(error))[-500:]}"
    finally:
        signal.alarm(0)
    if dist.is_initialized():
        dist.destroy_process_group()
        return f"{name}({arguments}) has left a process group"
    return None


def _choose(rng: random.Random) -> tuple[str, Any, dict[str, Any]]:
    """A function, and one or two of its arguments with values of any kind; the others are right."""
    import torch
    from torch import nn

    import phalanx as px

    def wrapped(**options: Any) -> Any:
        return px.data_parallel(**{"model": nn.Linear(1, 1), **options})

    def iterated(**options: Any) -> Any:
        return sum(1 for _ in px.ShardSampler(**{"dataset": [1, 2, 3], **options}))

    def restored(**state: Any) -> None:
        sampler = px.ShardSampler([1, 2, 3])
        sampler.load_state_dict({**sampler.state_dict(), **state})

    def tracked(**options: Any) -> Any:
        return sum(1 for _ in px.track(**{"loader": [torch.ones(2)], "quiet": True, **options}))

    def init(**options: Any) -> Any:
        return px.init(**{"timeout": 0.3, **options})

    def spawned(**options: Any) -> Any:
        return px.spawn(**{"fn": print, **options})

    choices: dict[str, tuple[Any, tuple[str, ...]]] = {
        "init": (init, ("backend", "init_method", "world_size", "rank", "store", "timeout", "device", "seed")),
        "data_parallel": (wrapped, ("model", "mode", "compress", "devices", "parts", "sync_batchnorm")),
        "ShardSampler": (iterated, ("dataset", "num_replicas", "rank", "shuffle", "seed", "drop_last", "uneven")),
        "load_state_dict": (restored, ("seed", "epoch", "consumed", "length", "version")),
        "shard": (lambda iterable=(), **rest: px.shard(iterable, **rest), ("iterable", "num_replicas", "rank")),
        "track": (tracked, ("loader", "epoch", "device")),
        "spawn": (spawned, ("fn", "args", "nprocs", "start_method")),
        "accumulate": (lambda every=2: px.accumulate(px.data_parallel(nn.Linear(1, 1)), every), ("every",)),
        "autocast": (lambda dtype=None: px.autocast(dtype), ("dtype",)),
        "log": (px.log, ("loss",)),
        "Mean.update": (lambda value=1.0, count=None: px.Mean().update(value, count), ("value", "count")),
        "Max.update": (lambda value=1.0: px.Max().update(value), ("value",)),
        "compute_metrics": (px.compute_metrics, ("loss",)),
        "main_only": (lambda function=print: px.main_only(function), ("function",)),
    }
    name = rng.choice(list(choices))
    function, names = choices[name]
    chosen = rng.sample(names, min(len(names), rng.choice((1, 1, 2))))
    return name, function, {each: rng.choice(VALUES) for each in chosen}
