"""The values of a state that are no tensors, as JSON and back, without a pickle.

None, booleans, numbers, strings, lists, and dicts whose keys are strings are stored as JSON has them. Every other value
is an object with one key that begins with ``$``: a tuple is ``{"$tuple": […]}``. Tensors and arrays are stored in a
shard, and the object has their name. An object of any other class is pickled, and only if the user trusts that.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol, TypeVar

import numpy
import torch
from torch import Tensor

from phalanx.checkpoint.storage.manifest import Broken, Encoded
from phalanx.torch_compat.nn import METADATA

StateDict = dict[str, Any]
"""The result of a ``state_dict()``: a tree of tensors, containers and values of any class."""
Path = tuple[object, ...]
"""The keys that lead to a value in a state."""
Keep = Callable[[Path, object], tuple[Literal["tensor", "array", "pickle"], str] | None]
"""Stores a value that has no form in JSON, and returns how and under which name; None if it refuses the value."""

TENSORS = (Tensor, torch.nn.Parameter)
_MAX_DEPTH = 64
"""Deeper values are refused: they would exhaust the interpreter's stack, and most of them contain themselves."""
T = TypeVar("T")


class Stateful(Protocol):
    """An object with a state that can be saved and loaded."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, state: Any, /) -> object: ...


class NotPlain(Exception):
    """A value is stored only with trust=True; the message names it."""


def encode(value: Any, path: Path, keep: Keep) -> Encoded:
    """Returns what json.dumps takes. Raises NotPlain for a value that ``keep`` refuses."""
    if len(path) > _MAX_DEPTH:
        raise NotPlain(f"{describe(path)[:80]}… is nested more than {_MAX_DEPTH} deep")
    kind = type(value)
    if kind in (type(None), bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return _encode_all(value, path, keep)
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(each, (*path, key), keep) for key, each in value.items()}
    if (encoder := _ENCODERS.get(kind)) is not None:
        return encoder(value, path, keep)
    if isinstance(value, numpy.bool_ | numpy.number):
        return {"$scalar": [value.dtype.str, _base64(value.tobytes())]}
    kept = keep(path, value)
    if kept is None:
        raise NotPlain(f"{describe(path)} is {_describe_class(value)}")
    return {f"${kept[0]}": kept[1]}


def _encode_all(values: Collection[object], path: Path, keep: Keep) -> list[Encoded]:
    if all(type(each) is int for each in values):  # the state of a random generator is 625 of them
        return list(values)
    return [encode(each, (*path, number), keep) for number, each in enumerate(values)]


def _encode_pairs(values: dict[object, object], path: Path, keep: Keep) -> list[Encoded]:
    return [[encode(key, (*path, key), keep), encode(each, (*path, key), keep)] for key, each in values.items()]


def _encode_ordered(value: OrderedDict[object, object], path: Path, keep: Keep) -> Encoded:
    """A module's state dict has the versions of its modules beside its items."""
    versions = METADATA.of(value)
    return {"$ordered": [_encode_pairs(value, path, keep), encode(versions, (*path, METADATA.attribute), keep)]}


_ENCODERS: dict[type, Callable[[Any, Path, Keep], Encoded]] = {
    float: lambda value, *_: {"$float": repr(value)},
    complex: lambda value, path, keep: {"$complex": _encode_all((value.real, value.imag), path, keep)},
    bytes: lambda value, *_: {"$bytes": _base64(value)},
    bytearray: lambda value, *_: {"$bytearray": _base64(value)},
    tuple: lambda *given: {"$tuple": _encode_all(*given)},
    torch.Size: lambda *given: {"$size": _encode_all(*given)},
    set: lambda *given: {"$set": _encode_all(*given)},
    frozenset: lambda *given: {"$frozenset": _encode_all(*given)},
    deque: lambda value, *given: {"$deque": [_encode_all(value, *given), value.maxlen]},
    dict: lambda *given: {"$dict": _encode_pairs(*given)},
    Counter: lambda *given: {"$counter": _encode_pairs(*given)},
    OrderedDict: _encode_ordered,
}


def is_array(value: object) -> bool:
    return type(value) is numpy.ndarray and value.dtype.kind in "biufc"


class Decoder:
    """Turns JSON into values. Raises Broken for what `encode` has not written; nothing that it reads is executed."""

    def __init__(self, read_tensor: Callable[[str], Tensor], unpickle: Callable[[Tensor], object]) -> None:
        self.read_tensor, self.unpickle = read_tensor, unpickle

    def decode(self, node: Encoded, depth: int = 0) -> Any:
        if depth > 3 * _MAX_DEPTH:  # a dict whose keys are no strings takes three levels of JSON
            raise Broken("its values are nested too deep")
        if isinstance(node, list):
            return [self.decode(each, depth + 1) for each in node]
        if not isinstance(node, dict):
            return node
        mark = next(iter(node), "")
        if not mark.startswith("$"):
            return {key: self.decode(each, depth + 1) for key, each in node.items()}
        try:
            return _DECODERS[mark](self, node[mark], depth + 1)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise Broken(f"a value of kind {mark[1:20]} is damaged: {type(error).__name__}") from None

    def decode_items(self, node: Encoded, depth: int) -> list[Any]:
        return self.decode(_checked(node, list), depth)


def _decode_ordered(decoder: Decoder, node: Encoded, depth: int) -> OrderedDict[object, object]:
    items, versions = node
    found = OrderedDict(decoder.decode_items(items, depth))
    if versions is not None:
        setattr(found, METADATA.attribute, decoder.decode(versions, depth))
    return found


_DECODERS: dict[str, Callable[[Decoder, Encoded, int], object]] = {
    "$tensor": lambda decoder, node, _: decoder.read_tensor(_checked(node, str)),
    "$array": lambda decoder, node, _: decoder.read_tensor(_checked(node, str)).numpy(),
    "$pickle": lambda decoder, node, _: decoder.unpickle(decoder.read_tensor(_checked(node, str))),
    "$scalar": lambda _, node, __: _decode_scalar(*node),
    "$float": lambda _, node, __: float(_checked(node, str)),
    "$complex": lambda decoder, *given: _decode_complex(*decoder.decode_items(*given)),
    "$bytes": lambda _, node, __: _from_base64(node),
    "$bytearray": lambda _, node, __: bytearray(_from_base64(node)),
    "$tuple": lambda decoder, *given: tuple(decoder.decode_items(*given)),
    "$size": lambda decoder, *given: torch.Size(decoder.decode_items(*given)),
    "$set": lambda decoder, *given: set(decoder.decode_items(*given)),
    "$frozenset": lambda decoder, *given: frozenset(decoder.decode_items(*given)),
    "$deque": lambda decoder, node, depth: deque(decoder.decode_items(node[0], depth), node[1]),
    "$dict": lambda decoder, *given: dict(decoder.decode_items(*given)),
    "$counter": lambda decoder, *given: Counter(dict(decoder.decode_items(*given))),
    "$ordered": _decode_ordered,
}


def _decode_complex(real: float, imaginary: float) -> complex:
    return complex(float(real), float(imaginary))


def _decode_scalar(dtype_name: Encoded, content: Encoded) -> object:
    dtype = numpy.dtype(_checked(dtype_name, str))
    if dtype.kind not in "biufc":
        raise ValueError(dtype_name)
    return numpy.frombuffer(_from_base64(content), dtype=dtype, count=1)[0]


def _base64(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def _from_base64(text: Encoded) -> bytes:
    return base64.b64decode(_checked(text, str), validate=True)


def _checked(node: Encoded, kind: type[T]) -> T:
    if not isinstance(node, kind):
        raise TypeError(type(node))
    return node


def describe(path: Path) -> str:
    """Returns ``extra['a'][0]``: the position of a value in the state."""
    return f"{path[0]}{''.join(f'[{each!r}]' for each in path[1:])}"


def _describe_class(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} ({value.layout}, {type(value).__name__})"
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"an object of class {name}"
