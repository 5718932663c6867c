"""Plain data from outside this process, as JSON: decoded, fitted to a type, and refused when it is anything else.

Whoever can reach a store, a socket or a directory can write there. Nothing that is read from them is unpickled or
evaluated: it becomes numbers, strings, and frozen dataclasses of these, or the error says where something else stands.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, overload

from phalanx.errors import ForeignData

T = TypeVar("T")


@overload
def decode(data: bytes | bytearray | str, shape: type[T], source: str) -> T: ...
@overload
def decode(data: bytes | bytearray | str, shape: types.UnionType, source: str) -> Any: ...


def decode(data: bytes | bytearray | str, shape: Any, source: str) -> Any:
    """``shape``: a type, such as ``tuple[str, int]`` or a dataclass; ``source``: where the data was read, for the
    error."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise _foreign(source, "it is no JSON") from None
    return fit(found, shape, source)


def fit(value: object, shape: type[T], source: str) -> T:
    """The same for what has been decoded already."""
    try:
        return _fit(value, shape)
    except (TypeError, ValueError, RecursionError) as error:
        raise _foreign(source, str(error)) from None


def _foreign(source: str, why: str) -> ForeignData:
    return ForeignData(f"{source} holds what phalanx did not write there ({why[:200]}); somebody else can write to it.")


def _fit(value: Any, shape: Any) -> Any:
    if shape is Any:
        return value
    if dataclasses.is_dataclass(shape):
        return _fit_fields(value, shape)
    if shape is float and type(value) is int:
        return float(value)
    by_origin = _BY_ORIGIN.get(typing.get_origin(shape), _require)
    return by_origin(value, shape)


def _fit_fields(value: Any, shape: Any) -> Any:
    _require(value, dict)
    hints = _hints(shape)
    for field in dataclasses.fields(shape):
        has_default = field.default is not field.default_factory  # both are MISSING otherwise
        if field.name not in value and not has_default:
            raise TypeError(f"{shape.__name__} without {field.name}")
    for name in value.keys() - hints.keys():
        raise TypeError(f"{shape.__name__} with {name!r:.50}")
    return shape(**{name: _fit(item, hints[name]) for name, item in value.items()})


@functools.cache
def _hints(shape: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(shape)
    return {field.name: hints[field.name] for field in dataclasses.fields(shape)}


def _fit_one_of(value: Any, shape: Any) -> Any:
    why = ""
    for one in typing.get_args(shape):
        try:
            return _fit(value, one)
        except (TypeError, ValueError) as error:
            why = why or str(error)
    raise TypeError(why)


def _fit_literal(value: Any, shape: Any) -> Any:
    return value if value in typing.get_args(shape) else _refuse(value, shape)


def _fit_mapping(value: Any, shape: Any) -> Any:
    """JSON has strings for keys, whatever they were before."""
    key, content = typing.get_args(shape)
    return {key(name): _fit(item, content) for name, item in _require(value, dict).items()}


def _fit_items(value: Any, shape: Any) -> Any:
    _require(value, list)
    origin, arguments = typing.get_origin(shape), typing.get_args(shape)
    if origin is not tuple:
        return [_fit(item, arguments[0]) for item in value]
    if arguments[-1] is Ellipsis:
        return tuple(_fit(item, arguments[0]) for item in value)
    if len(value) != len(arguments):
        raise TypeError(f"{len(value)} items where {len(arguments)} belong")
    return tuple(map(_fit, value, arguments))


def _require(value: Any, shape: Any) -> Any:
    """Refuses a value that is not of exactly this type: True is no number here."""
    return value if type(value) is shape else _refuse(value, shape)


def _refuse(value: Any, shape: Any) -> typing.NoReturn:
    raise TypeError(f"{value!r:.50} where {getattr(shape, '__name__', shape)} belongs")


_BY_ORIGIN: dict[Any, Callable[[Any, Any], Any]] = {
    Union: _fit_one_of,
    types.UnionType: _fit_one_of,
    Literal: _fit_literal,
    tuple: _fit_items,
    list: _fit_items,
    dict: _fit_mapping,
    Mapping: _fit_mapping,
}
