"""torch.Tensor, and tensors in any nesting of containers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from phalanx.torch_compat import OLDEST_FOR_SHM
from phalanx.torch_compat.names import Name

if TYPE_CHECKING:
    from torch import Tensor

VERSION = Name(
    "torch:Tensor._version",
    "Shows whether a tensor was changed before a checkpoint copied it in the background.",
    "Checkpoints are copied while training waits.",
)
SET_ALLOCATOR = Name(
    "torch._C:_accelerator_setAllocatorSettings",
    "PYTORCH_ALLOC_CONF that a script sets before its import of torch is applied in a forked worker.",
    "PYTORCH_ALLOC_CONF has an effect in a forked worker only when it is set in the shell.",
    since=(2, 13),
)
IS_ZERO = Name(
    "torch:Tensor._is_zerotensor",
    "Tensors of zeros that have no memory, as autograd makes them.",
    "shm refuses such tensors.",
    since=OLDEST_FOR_SHM,
)


def zero_check() -> Callable[[Tensor], bool]:
    """Returns the function that recognises a tensor of zeros without memory."""
    return IS_ZERO.get() or (lambda _: False)


# ---- tensors in containers

PYTREE = Name(
    "torch.utils._pytree",
    "Batches, arguments and results in any nesting, of types that were registered with torch too.",
    "Tensors are found only in lists, tuples and dictionaries.",
)
Tree = Any
"""Objects in any nesting of containers."""
_T = TypeVar("_T")
_S = TypeVar("_S")


def tree_map_only(wanted: type[_T], function: Callable[[_T], object], tree: _S) -> _S:
    """Returns the same nesting, with each object of one type replaced."""
    return _functions().tree_map_only(wanted, function, tree)


def tree_map_where(wanted: Callable[[object], bool], function: Callable[[Any], object], tree: _S) -> _S:
    """Returns the same nesting, with each object that is wanted replaced; containers that are wanted too."""
    return _functions().tree_map(lambda leaf: function(leaf) if wanted(leaf) else leaf, tree, is_leaf=wanted)


def tree_flatten(tree: object) -> tuple[list[object], Tree]:
    """Returns the objects in a nesting, and its shape for `tree_unflatten`."""
    return _functions().tree_flatten(tree)


def tree_unflatten(leaves: Iterable[object], shape: Tree) -> Tree:
    return _functions().tree_unflatten(leaves, shape)


@functools.cache
def _functions() -> Any:
    """Returns torch's module, or the same functions for Python's own containers."""
    if PYTREE.get() is not None:
        return importlib.import_module(PYTREE.path)
    return SimpleNamespace(tree_map=_map, tree_map_only=_map_only, tree_flatten=_flatten, tree_unflatten=_unflatten)


def _map(function: Callable[[Tree], Tree], tree: Tree, is_leaf: Callable[[Tree], bool] = lambda _: False) -> Tree:
    kind: Callable[..., Tree] = type(tree)
    if is_leaf(tree):
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(_map(function, each, is_leaf) for each in tree))
    if isinstance(tree, dict):
        return dict(zip(tree, (_map(function, each, is_leaf) for each in tree.values()), strict=True))
    if kind in (list, tuple):
        return kind(_map(function, each, is_leaf) for each in tree)
    return function(tree)


def _map_only(wanted: type, function: Callable[[Tree], Tree], tree: Tree) -> Tree:
    return _map(lambda leaf: function(leaf) if isinstance(leaf, wanted) else leaf, tree)


def _flatten(tree: Tree) -> tuple[list[Tree], Tree]:
    leaves: list[Tree] = []
    return leaves, _map(leaves.append, tree)


def _unflatten(leaves: Iterable[Tree], shape: Tree) -> Tree:
    following = iter(leaves)
    return _map(lambda _: next(following), shape)
