"""send and recv of other backends: torch's flight recorder does not see those of gloo."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from phalanx import status
from phalanx.recorder.flight_reader import is_noted_elsewhere
from phalanx.status import layout
from phalanx.torch_compat import c10d


def install() -> None:
    c10d.SEND.wrap(functools.partial(_noted, layout.SEND))
    c10d.RECV.wrap(functools.partial(_noted, layout.RECV))


def _noted(op: int, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def message(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind_partial(tensor, *args, **kwargs).arguments
        group = given.get("group") or dist.group.WORLD
        if status.own() is None or is_noted_elsewhere(group):
            return plain(tensor, *args, **kwargs)
        peer = _peer(given, group)
        with status.waiting(op, peer=layout.NO_PEER if peer is None else peer, size=tensor.numel()):
            return plain(tensor, *args, **kwargs)

    return message


def _peer(given: Mapping[str, Any], group: Any) -> int | None:
    """Among all ranks; None: anybody. Newer versions of torch also take its number in the group."""
    for among_all, in_group in (("src", "group_src"), ("dst", "group_dst")):
        if given.get(among_all) is not None:
            return given[among_all]
        if given.get(in_group) is not None:
            return dist.get_global_rank(group, given[in_group])
    return None
