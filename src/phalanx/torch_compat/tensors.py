"""torch.Tensor, and tensors in any nesting of containers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.torch_compat import OLDEST_FOR_SHM
from phalanx.torch_compat.names import Name

VERSION = Name(
    "torch:Tensor._version",
    "Whether a tensor was changed before a checkpoint has copied it in the background.",
    "Checkpoints are copied while training waits.",
)
IS_ZERO = Name(
    "torch:Tensor._is_zerotensor",
    "Tensors of zeros that have no memory, as autograd makes them.",
    "shm refuses such tensors.",
    since=OLDEST_FOR_SHM,
)


def zero_check() -> Callable[[Any], bool]:
    """Whether a tensor stands for zeros without any memory."""
    return IS_ZERO.get() or (lambda _: False)


# ---- tensors in containers

PYTREE = Name(
    "torch.utils._pytree",
    "Batches, arguments and results in any nesting, of types that were registered with torch too.",
    "Tensors are found in lists, tuples and dictionaries alone.",
)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    kind: Any = type(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(_map(function, each) for each in tree))
    if isinstance(tree, dict):
        return dict(zip(tree, (_map(function, each) for each in tree.values()), strict=True))
    if kind in (list, tuple):
        return kind(_map(function, each) for each in tree)
    return function(tree)


class _Containers:
    """The same functions for the containers that are Python's own."""

    @staticmethod
    def tree_map_only(wanted: type, function: Callable[[Any], Any], tree: Any) -> Any:
        return _map(lambda leaf: function(leaf) if isinstance(leaf, wanted) else leaf, tree)

    @staticmethod
    def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
        leaves: list[Any] = []
        return leaves, _map(leaves.append, tree)

    @staticmethod
    def tree_unflatten(leaves: Iterable[Any], shape: Any) -> Any:
        following = iter(leaves)
        return _map(lambda _: next(following), shape)


_found: Any = None


def _tree() -> Any:
    global _found
    if _found is None:
        _found = _Containers if PYTREE.get() is None else importlib.import_module(PYTREE.path)
    return _found


def tree_map_only(wanted: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nesting, with each object of one type replaced."""
    return _tree().tree_map_only(wanted, function, tree)


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    return _tree().tree_flatten(tree)


def tree_unflatten(leaves: Iterable[Any], shape: Any) -> Any:
    return _tree().tree_unflatten(leaves, shape)
