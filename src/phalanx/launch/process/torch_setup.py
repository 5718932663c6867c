"""Adds to torch what `phalanx run` offers in a worker: the backend shm, the recorder, the patches of the store.

The zygote does it once for all. A worker in an interpreter of its own does it when its script imports torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from phalanx.torch_compat import dataloader, dynamo


def install() -> None:
    """Installs it; torch is imported."""
    importlib.import_module("phalanx.backends").install()
    importlib.import_module("phalanx.store.tcp_store").install()
    importlib.import_module("phalanx.recorder").install()
    importlib.import_module("phalanx.preemption.loader_workers").install()
    for name in (dynamo.PRELOADED, dataloader.WORKER, dataloader.SIGNAL_HANDLER):
        name.get()  # processes without torch use these names: a missing one is reported here


def install_on_import() -> None:
    """Installs it when torch is imported."""
    sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, once, and calls `install` when torch has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader, plain = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            plain(module)
            install()

        loader.exec_module = exec_module  # type: ignore[method-assign]  # for this loader alone
        return spec
