"""The codec of everything that crosses a process boundary: typed records, written and read as JSON.

Anybody who can reach a store, a socket or a directory can write there. Nothing that is read from them is unpickled or
evaluated: it becomes a record whose fields have their types and bounds, or ForeignData is raised. Messages that cause
an action are sealed as well: the seal needs the run's secret, and is checked before anything is decoded.

msgspec resolves the annotations of a record when it first reads one, so their names have to be there at run time.
Python resolves a plain base class beside Record wrongly: a record has one base.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, TypeVar, overload

import msgspec
from msgspec import Meta

from phalanx import secret
from phalanx.errors import ForeignData

T = TypeVar("T")
replace = msgspec.structs.replace
asdict = msgspec.structs.asdict
"""The fields of a record, without those of the records in them."""

MOST_BYTES = 16 << 20
"""The largest message: more than any environment or report of a rank, and harmless to memory."""
_NO_SEAL = b"-" * secret.SEAL_CHARACTERS

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""A number of things, or of bytes."""
Port = Annotated[int, Meta(ge=1, lt=1 << 16)]
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
"""The number of a rank, a local rank or a node."""
Pid = Annotated[int, Meta(ge=1, lt=1 << 31)]
Signal = Annotated[int, Meta(ge=1, lt=65)]
StopSignal = Annotated[int, Meta(ge=0, lt=32)]
"""A signal that asks a run to stop; 0: its script asks."""
ExitCode = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 32)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12)]
"""A duration, or a time since the epoch."""
Name = Annotated[str, Meta(max_length=1_000)]
"""A host, a variable, a class: one line."""
HostName = Annotated[str, Meta(pattern=r"^[0-9A-Za-z.:%_-]{1,255}$")]
"""A host's name or address. It may be printed."""
Text = Annotated[str, Meta(max_length=1 << 20)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record with named, typed fields."""


class Message(Record, frozen=True, tag=True, tag_field="message"):
    """One of several records that a receiver may get, distinguished by the name of its class.

    To read one, decode the union of its family and ``match`` on the type.
    """


def encode(record: object) -> bytes:
    """The record as JSON on one line. Not-a-number becomes null, and a path its text."""
    try:
        return msgspec.json.encode(record, enc_hook=_plain)
    except UnicodeEncodeError:  # paths, arguments and variables need not be UTF-8
        return json.dumps(msgspec.to_builtins(record, str_keys=True, enc_hook=_plain)).encode()


def indented(record: object) -> str:
    """The record as JSON that people can read."""
    return json.dumps(json.loads(encode(record)), indent=2)


@overload
def decode(data: bytes | bytearray | str, shape: type[T], source: str, most: int = ...) -> T: ...
@overload
def decode(data: bytes | bytearray | str, shape: UnionType, source: str, most: int = ...) -> Any: ...


def decode(
    data: bytes | bytearray | str, shape: type[object] | UnionType, source: str, most: int = MOST_BYTES
) -> object:
    """Reads what `encode` has written, or raises ForeignData.

    ``shape``: a record, a union of messages, or a type such as ``tuple[str, int]``; ``source``: where the data was
    read, for the error; ``most``: the bytes that are read at all.
    """
    if len(data) > most:
        raise _foreign(source, f"{len(data)} bytes, where {most} are the most")
    try:
        return _decoder(shape)(data)
    except msgspec.ValidationError as error:
        raise _foreign(source, str(error)) from None
    except RecursionError:
        raise _foreign(source, "its nesting is too deep") from None
    except ValueError:  # msgspec's DecodeError is one, and so are those of Unicode
        return _decode_any_unicode(data, shape, source)


def fit(value: object, shape: type[T] | UnionType, source: str) -> T:
    """Reads what has been decoded already, such as the fields of a larger message."""
    try:
        return msgspec.convert(value, shape, str_keys=True)
    except (ValueError, RecursionError) as error:
        raise _foreign(source, str(error)) from None


def seal(key: str, counter: int, payload: bytes) -> bytes:
    """The payload after a seal that only the processes of this run can make, for this key and counter alone.

    Without a secret there is no seal, and everybody who reaches the store or the connection is trusted.
    """
    return _seal(key, counter, payload) + payload


def open_sealed(key: str, counter: int, data: bytes, source: str) -> bytes:
    """The payload, or ForeignData if it was not sealed by a process of this run for this key and counter."""
    import hmac

    given, payload = data[: secret.SEAL_CHARACTERS], data[secret.SEAL_CHARACTERS :]
    if hmac.compare_digest(_seal(key, counter, payload), given):
        return payload
    has_secret = secret.text() is not None
    raise _foreign(source, "its seal is wrong" if has_secret else "it is sealed, and this process has no secret")


def _seal(key: str, counter: int, payload: bytes) -> bytes:
    if secret.text() is None:
        return _NO_SEAL
    name = key.encode()
    return secret.seal(len(name).to_bytes(8) + name + counter.to_bytes(8, signed=True) + payload)


@functools.cache
def _decoder(shape: type[object] | UnionType) -> Callable[[bytes | bytearray | str], object]:
    return msgspec.json.Decoder(shape).decode


def _decode_any_unicode(data: bytes | bytearray | str, shape: type[object] | UnionType, source: str) -> object:
    """Reads text that is not UTF-8, which msgspec refuses."""
    try:
        found = json.loads(data, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise _foreign(source, "it is no JSON") from None
    return fit(found, shape, source)


def _plain(value: object) -> object:
    return float(value) if isinstance(value, float) else str(value)  # numpy's are floats of their own


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _foreign(source: str, why: str) -> ForeignData:
    reason = why[:200]
    error = ForeignData(f"{source} holds what phalanx did not write there ({reason}); somebody else can write to it.")
    error.reason = reason
    return error
