"""Plain values as JSON and back, without a pickle: whatever a checkpoint holds beside its tensors.

None, booleans, numbers, strings, lists, and dicts whose keys are strings are stored as JSON has them. Every other value
is an object with one key that begins with ``$``: a tuple is ``{"$tuple": […]}``. Tensors and arrays are stored in a
shard, and the object has their name. An object of any other class is pickled, and only if the user trusts that.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from phalanx.checkpoint.storage.manifest import Broken
from phalanx.torch_compat.nn import METADATA

Path = tuple[Any, ...]
Keep = Callable[[Path, Any], tuple[Literal["tensor", "array", "pickle"], str] | None]
"""Stores a value that is not plain: how, and the name it has there; None if it is refused."""

_DEPTH = 64
"""Deeper values are refused: they would end the interpreter's stack, and contain themselves more often than not."""


class NotPlain(Exception):
    """A value that is stored only with trust=True; the message names it."""


def encode(value: Any, path: Path, keep: Keep) -> Any:
    """What json.dumps takes. Raises NotPlain for what ``keep`` refuses."""
    if len(path) > _DEPTH:
        raise NotPlain(f"{describe(path)[:80]}… is nested more than {_DEPTH} deep")
    kind = type(value)
    if kind in (type(None), bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return _all(value, path, keep)
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(each, (*path, key), keep) for key, each in value.items()}
    if (encoder := _ENCODERS.get(kind)) is not None:
        return encoder(value, path, keep)
    if isinstance(value, numpy.bool_ | numpy.number):
        return {"$scalar": [value.dtype.str, _text(value.tobytes())]}
    name = keep(path, value)
    if name is None:
        raise NotPlain(f"{describe(path)} is {_article(value)}")
    return {f"${name[0]}": name[1]}


TENSORS = (Tensor, torch.nn.Parameter)


def is_array(value: Any) -> bool:
    return type(value) is numpy.ndarray and value.dtype.kind in "biufc"


def _all(values: Collection[Any], path: Path, keep: Keep) -> list[Any]:
    if all(type(each) is int for each in values):  # the state of a random generator is 625 of them
        return list(values)
    return [encode(each, (*path, number), keep) for number, each in enumerate(values)]


def _pairs(values: dict[Any, Any], path: Path, keep: Keep) -> list[Any]:
    return [[encode(key, (*path, key), keep), encode(each, (*path, key), keep)] for key, each in values.items()]


def _ordered(value: Any, path: Path, keep: Keep) -> Any:
    """A module's state dict has the versions of its modules beside its items."""
    versions = METADATA.of(value)
    return {"$ordered": [_pairs(value, path, keep), encode(versions, (*path, METADATA.attribute), keep)]}


_ENCODERS: dict[type, Callable[[Any, Path, Keep], Any]] = {
    float: lambda value, *_: {"$float": repr(value)},
    complex: lambda value, path, keep: {"$complex": _all((value.real, value.imag), path, keep)},
    bytes: lambda value, *_: {"$bytes": _text(value)},
    bytearray: lambda value, *_: {"$bytearray": _text(value)},
    tuple: lambda *given: {"$tuple": _all(*given)},
    torch.Size: lambda *given: {"$size": _all(*given)},
    set: lambda *given: {"$set": _all(*given)},
    frozenset: lambda *given: {"$frozenset": _all(*given)},
    deque: lambda value, *given: {"$deque": [_all(value, *given), value.maxlen]},
    dict: lambda *given: {"$dict": _pairs(*given)},
    OrderedDict: _ordered,
    Counter: lambda *given: {"$counter": _pairs(*given)},
}


# ---- back


class Decoder:
    """From JSON to values. Whatever `encode` has not written raises Broken, and nothing that was read is executed."""

    def __init__(self, tensor: Callable[[str], Tensor], unpickle: Callable[[Tensor], Any]) -> None:
        self._tensor, self._unpickle = tensor, unpickle

    def decode(self, node: Any, depth: int = 0) -> Any:
        if depth > 3 * _DEPTH:  # a dict whose keys are no strings takes three levels of JSON
            raise Broken("its values are nested too deep")
        if isinstance(node, list):
            return [self.decode(each, depth + 1) for each in node]
        if not isinstance(node, dict):
            return node
        mark = next(iter(node), "")
        if not mark.startswith("$"):
            return {key: self.decode(each, depth + 1) for key, each in node.items()}
        try:
            return self._special(mark, node[mark], depth + 1)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise Broken(f"a value of kind {mark[1:20]} is damaged: {type(error).__name__}") from None

    def _special(self, mark: str, node: Any, depth: int) -> Any:
        if mark in ("$tensor", "$array", "$pickle"):
            tensor = self._tensor(_string(node))
            return tensor if mark == "$tensor" else tensor.numpy() if mark == "$array" else self._unpickle(tensor)
        if mark in ("$float", "$bytes", "$bytearray"):
            text = _string(node)
            return float(text) if mark == "$float" else (bytes if mark == "$bytes" else bytearray)(_bytes(text))
        if mark == "$scalar":
            return _scalar(*node)
        if mark in _MAKERS:
            return _MAKERS[mark](self.decode(_list(node), depth))
        if mark == "$deque":
            items, most = node
            return deque(self.decode(_list(items), depth), most)
        if mark == "$ordered":
            items, versions = node
            found = OrderedDict(self.decode(_list(items), depth))
            if versions is not None:
                setattr(found, METADATA.attribute, self.decode(versions, depth))
            return found
        raise ValueError(mark)


_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "$complex": lambda both: complex(float(both[0]), float(both[1])),
    "$tuple": tuple,
    "$size": torch.Size,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}


def _scalar(kind: Any, content: Any) -> Any:
    dtype = numpy.dtype(_string(kind))
    if dtype.kind not in "biufc":
        raise ValueError(kind)
    return numpy.frombuffer(_bytes(content), dtype=dtype, count=1)[0]


def _text(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def _bytes(text: Any) -> bytes:
    return base64.b64decode(_string(text), validate=True)


def _string(node: Any) -> str:
    if not isinstance(node, str):
        raise TypeError(type(node))
    return node


def _list(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError(type(node))
    return node


def describe(path: Path) -> str:
    """``extra['a'][0]``: where a value stands in the state."""
    return f"{path[0]}{''.join(f'[{each!r}]' for each in path[1:])}"


def _article(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} ({value.layout}, {type(value).__name__})"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of class {name}"
