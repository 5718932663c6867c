"""torch.utils.data.DataLoader: the phase data, and killed workers of a loader."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from phalanx.torch_compat.names import Name, Replaced

NEXT = Replaced(
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    "The recorder notes the phase data.",
    "The phase data in the status page: waiting for a loader looks like own work.",
)
ITERATOR = Name(
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
    "Found in a traceback, it has the workers of the loader that failed.",
    "A worker that was killed is not named where torch itself notices it too late.",
)
WORKERS = Name(
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter._workers",
    "The workers' processes.",
    "A worker that was killed is not named where torch itself notices it too late.",
)
SIGNAL_HANDLER = Name(
    "torch.utils.data._utils.signal_handling",
    "The handler that raises when a worker was killed: it is removed once a script has failed.",
    "A worker that dies while a failure is reported may hide the script's own line.",
)
WORKER = Name(
    "torch.utils.data._utils.worker",
    "Its file identifies the stack of a loader's worker.",
    "Reports on a rank that waits for its loader do not show what the workers do.",
)
WORKER_LOOP = Replaced(
    "torch.utils.data._utils.worker:_worker_loop",
    "A loader's worker ignores the signals of a scheduler: its rank decides when it ends.",
    "A signal to every process of a run kills the loaders' workers, and torch raises that in the rank while it saves.",
)
START_WORKERS = Replaced(
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter.__init__",
    "Signals are blocked while the workers start.",
    "A signal to every process of a run kills loaders' workers that are just starting.",
)
SET_WORKER_SIGNALS = Name(
    "torch.utils.data._utils.signal_handling:_set_worker_signal_handlers",
    "The worker's own handlers are installed after torch's.",
    "A signal to every process of a run kills the loaders' workers.",
)
WORKER_FILE = WORKER.path.replace(".", "/") + ".py"
_HANDLER_FILE = SIGNAL_HANDLER.path.replace(".", "/") + ".py"


def after_worker_signals(call: Callable[[], None]) -> None:
    """In a loader's worker: calls it after torch has set its own signal handlers."""
    plain = SET_WORKER_SIGNALS.get()

    def set_both() -> None:
        if plain is not None:
            plain()
        call()

    setattr(importlib.import_module(SIGNAL_HANDLER.path), SET_WORKER_SIGNALS.attribute, set_both)


def workers_of(iterator: object) -> list[Any]:
    return WORKERS.needed_of(iterator, [])


def is_handler_of_loaders(handler: object) -> bool:
    """Returns whether a signal handler is torch's for killed workers."""
    return getattr(handler, "__module__", None) == SIGNAL_HANDLER.path and SIGNAL_HANDLER.get() is not None


def is_in_handler(file: str) -> bool:
    """Returns whether a file in a traceback is that handler's."""
    return file.endswith(_HANDLER_FILE)
