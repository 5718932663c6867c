"""What `phalanx run` adds to torch in a worker: the backend shm and its choice instead of gloo, the recorder,
and addresses of the script's own for its process group.

The zygote does it once for all. An interpreter of its own does it when the script imports torch, and never if it
does not.
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
    """torch is imported."""
    importlib.import_module("phalanx.backends").install()
    importlib.import_module("phalanx.store.tcp_store").install()
    importlib.import_module("phalanx.recorder").install()
    for name in (dynamo.PRELOADED, dataloader.WORKER, dataloader.SIGNAL_HANDLER):
        name.get()  # what processes without torch know them by: noted here if it is missing


def install_on_import() -> None:
    sys.meta_path.insert(0, _Watch())


class _Watch(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, once, and does the rest when it has been executed."""

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

        loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec
