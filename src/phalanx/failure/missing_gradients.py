"""Rewrites DDP's "Expected to have finished reduction in the prior iteration" with the names of the parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SHOWN = 8


def missing_gradients(
    message: str, names: Sequence[str], find_unused: bool, wrapper: str = "data_parallel", switch: str = "find_unused"
) -> str | None:
    """Returns the text that replaces DDP's ``message``; None if that is about something else.

    Args:
        names: the names of the parameters, in the order in which DDP numbers them.
        find_unused: True if DDP looks for unused parameters.
        wrapper: the function that has wrapped the model, and ``switch`` its argument to look for them.
    """
    if "Expected to have finished reduction in the prior iteration" not in message:
        return None
    found = re.search(r"Parameter indices which did not receive grad for rank (\d+):((?: \d+)+)", message)
    indices = [int(index) for index in found[2].split()] if found else []
    if found is None or max(indices) >= len(names):
        return None
    missing = [names[index] for index in indices]
    shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
    fact = f"{shown} got no gradient in the last step on rank {found[1]}, so it was never finished"
    if find_unused:
        return f"{fact}; {switch}=True is not enough here: every output of forward must take part in the loss."
    them = "it" if len(missing) == 1 else "them"
    return f"{fact}; give {wrapper} {switch}=True, freeze {them} with requires_grad_(False), or use {them} in the loss."
