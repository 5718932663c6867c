"""`px.log`: values of this rank, kept until somebody shows them. Nothing is exchanged or fetched when it is called."""

from __future__ import annotations

from torch import Tensor

from phalanx.errors import UsageError

Value = float | int | Tensor
Sums = dict[str, tuple[float, int]]
"""Of each name the sum of what was given, and how often."""


class Kept:
    """What was given since it was last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Value, int]] = {}

    def add(self, name: str, value: Value) -> None:
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UsageError(f"px.log({name}=…) got a tensor of shape {tuple(value.shape)}; log its mean.")
            value = value.detach()
        elif not isinstance(value, (int, float)):
            raise UsageError(f"px.log({name}={value!r}) is not a number.")
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value, count + 1

    def take(self) -> Sums:
        """The numbers themselves; on a GPU this waits for them."""
        taken, self._sums = self._sums, {}
        return {name: (float(total), count) for name, (total, count) in taken.items()}


_kept = Kept()


def log(**values: Value) -> None:
    """Gives values to the progress line of `px.track` and to the run's events.

    Each rank's values since the last time are averaged when they are shown, over the ranks too; until then nothing
    is exchanged, and no value is fetched from a GPU.
    """
    for name, value in values.items():
        _kept.add(name, value)


def take() -> Sums:
    return _kept.take()
