"""Writes down everything a script can see of its process. Run in a forked and in a fresh one, and compared."""

from __future__ import annotations

import atexit
import faulthandler
import inspect
import json
import os
import pickle
import signal
import sys
import threading
from typing import Any

torch_was_there = "torch" in sys.modules
numpy_was_there = "numpy" in sys.modules
OUT = sys.argv[1]


class Sample:
    """Pickled by its name in this module."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Sample) and self.value == other.value

    def __hash__(self):
        return hash(self.value)


def double(sample):
    return Sample(sample.value * 2)


class Numbers:
    """A dataset of this module, for loader workers of every kind."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


def descriptors():
    kinds = []
    for fd in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        target = target.replace(os.environ["PHALANX_RUN_DIR"], "the run directory")
        kinds.append(target.split(":")[0] if ":" in target else target)
    return kinds


def signals():
    return {
        name.name: str(signal.getsignal(name)) for name in signal.valid_signals() if isinstance(name, signal.Signals)
    }


def loaders():
    from torch.utils.data import DataLoader

    results = {}
    for method in ("fork", "spawn"):
        numbers: Any = Numbers()
        loader = DataLoader(numbers, batch_size=4, num_workers=1, multiprocessing_context=method)
        results[method] = [batch.tolist() for batch in loader]
    return results


def pools():
    import multiprocessing

    results = {}
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            results[method] = [sample.value for sample in pool.map(double, [Sample(1), Sample(2)])]
    return results


def main():
    main_module = sys.modules["__main__"]
    facts = {
        "torch was there": torch_was_there,
        "numpy was there": numpy_was_there,
        "argv": sys.argv[2:],
        "argv0": sys.argv[0],
        "orig_argv": [word for word in sys.orig_argv[1:] if word != OUT],
        "path": sys.path,
        "flags": str(sys.flags),
        "xoptions": sys._xoptions,
        "warnoptions": sys.warnoptions,
        "executable": sys.executable,
        "prefix": sys.prefix,
        "file": __file__,
        "spec": __spec__ and [__spec__.name, __spec__.origin, __spec__.parent],
        "package": __package__,
        "cached": globals().get("__cached__", "absent"),
        "loader": type(__loader__).__name__,
        "doc": __doc__,
        "main is us": main_module.__dict__ is globals(),
        "names": sorted(name for name in vars(main_module) if name.startswith("__")),
        "frames": [frame.function for frame in inspect.stack()][:2],
        "stdin": sys.stdin.read(),
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.isatty()],
        "stderr": [sys.stderr.encoding, sys.stderr.errors, sys.stderr.line_buffering, sys.stderr.isatty()],
        "signals": signals(),
        "mask": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "wakeup": signal.set_wakeup_fd(-1),
        "threads": threading.active_count(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "session leader": os.getsid(0) == os.getpid(),
        "cwd": os.getcwd(),
        "umask": os.umask(0o22),
        "descriptors": descriptors(),
        "faulthandler": faulthandler.is_enabled(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "meta path": [
            type(finder).__name__ for finder in sys.meta_path if not type(finder).__module__.startswith("phalanx.")
        ],
        "pickle": pickle.loads(pickle.dumps(Sample(3))) == Sample(3),
        "pickled as": b"__main__" in pickle.dumps(Sample(3)),
        "environment": {k: v for k, v in os.environ.items() if k not in ("PHALANX_STORE", "MASTER_PORT")},
    }
    import multiprocessing
    import random

    import numpy
    import torch

    facts |= {
        "torch threads": torch.get_num_threads(),
        "pools": pools(),
        # A spawned worker of a loader imports torch again: once, in the forked script's rank 0, is enough.
        "loaders": loaders() if os.environ["RANK"] == "0" and __spec__ is None and OUT.endswith("fork") else None,
        "parent process": str(multiprocessing.parent_process()),
        "process name": multiprocessing.current_process().name,
        "torch file": torch.__file__,
        "torch spec": [torch.__spec__.name, torch.__spec__.origin],
        "numpy spec": [numpy.__spec__.name, numpy.__spec__.origin],
        "nn is one": sys.modules["torch.nn"] is torch.nn,
        "rank": os.environ["RANK"],
    }
    for name in ("PHALANX_RUN_TOKEN", "PHALANX_RUN_DIR", "TORCHELASTIC_RUN_ID"):
        assert facts["environment"].pop(name)
    random_state = {
        "random": [random.random(), float(numpy.random.rand()), float(torch.rand(1)), torch.initial_seed()],
        "authkey": multiprocessing.current_process().authkey.hex(),
    }
    with open(f"{OUT}.{os.environ['RANK']}.json", "w") as file:
        json.dump({"facts": facts, "random": random_state}, file)
    atexit.register(print, "atexit ran")
    print("probed")
    thread = threading.Thread(target=print, args=("thread ran",))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
