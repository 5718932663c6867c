"""The primitives of all protocols over the store: typed values under a key, waiting for keys, missing ranks.

Every process that reaches a store can write to it, so a value is decoded with its type and bounds, or is an error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from phalanx import messages
from phalanx.store.tcp_store import notify

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")
SOURCE = "the store of the run"
_LOOK_EVERY = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
"""Seconds between two requests: they grow with the wait, so that a long one costs little and a short one no time."""
_PRINT_EVERY = 10.0
_MOST_NAMED = 16


def write(store: Store, key: str, value: object) -> None:
    store.set(key, messages.encode(value).decode())


def read(store: Store, key: str, shape: type[T]) -> T:
    """Returns the value of a key that is known to be set, or raises ForeignData."""
    return messages.decode(store.get(key), shape, SOURCE)


def propose(store: Store, key: str, value: T) -> T:
    """Sets the key unless another rank was first. Returns the value of the first, the same one on all ranks."""
    return messages.decode(store.compare_set(key, "", messages.encode(value).decode()), type(value), SOURCE)


def wait_for(
    store: Store,
    keys: str | Sequence[str],
    seconds: float = math.inf,
    look: Callable[[float], Exception | None] | None = None,
    look_every: float = _LOOK_EVERY,
) -> bool:
    """Waits until all keys are set. Returns False when they are not within ``seconds``; a lost store is an error.

    ``look`` is called every ``look_every`` seconds with the time waited so far. It returns the error that ends the
    wait, such as the death of the rank that was to set a key, which counts only if that has not set it before.

    The store's own wait cannot be interrupted by a signal, and prints two lines of warnings at each timeout.
    """
    wanted = [keys] if isinstance(keys, str) else list(keys)
    started = looked = time.monotonic()
    pause = _FIRST_PAUSE
    while not store.check(wanted):
        now = time.monotonic()
        left = started + seconds - now
        if left <= 0:
            return False
        if look is not None and now - looked >= look_every:
            looked = now
            error = look(now - started)
            if error is not None and not store.check(wanted):
                raise error
        time.sleep(min(pause, left))
        pause = min(pause * 1.3, _LONGEST_PAUSE)
    return True


def await_verdict(store: Store, arrived: str, size: int, timeout: float, who: str, whom: str) -> str:
    """Waits for the key ``verdict``, which one rank sets for all, and prints every ten seconds which ranks are missing.

    A rank is missing until it sets ``<arrived>/<rank>``. Returns an empty text, or after ``timeout`` the missing ranks.
    """

    def missing(waited: float) -> str:
        ranks = [rank for rank in range(size) if not store.check([f"{arrived}/{rank}"])]
        names = ", ".join(map(str, ranks[:_MOST_NAMED])) + (" …" if len(ranks) > _MOST_NAMED else "")
        return f"waited {waited:.0f} s for {len(ranks)} of {size} {whom}: {names}"

    def report(waited: float) -> None:
        notify(f"{who} {missing(waited)}")

    return "" if wait_for(store, "verdict", timeout, report, _PRINT_EVERY) else missing(timeout)
