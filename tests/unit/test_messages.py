"""The codec: what was written is read, whatever else there is becomes ForeignData; seals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx import messages, secret
from phalanx.errors import ForeignData
from phalanx.messages import Count, Message, Name, Pid, Port, Rank, Record, Seconds


class Part(Record, frozen=True):
    name: Name
    size: float | None = None


class Whole(Record, frozen=True):
    kind: Literal["a", "b"]
    count: int
    parts: tuple[Part, ...]
    pairs: Mapping[int, tuple[str, bool]]
    rest: Any = None


class Start(Message, frozen=True):
    rank: Rank
    port: Port
    delay: Seconds = 0.0


class Stop(Message, frozen=True):
    pid: Pid
    bytes: Count = 0


WHOLE = Whole("b", 3, (Part("x", 1.5), Part("y")), {7: ("z", True)}, {"any": [1, None]})
STATED = r"^the store holds what phalanx did not write there \(.+\); somebody else can write to it\.$"


def test_what_was_written_is_read() -> None:
    assert messages.decode(messages.encode(WHOLE), Whole, "here") == WHOLE
    assert messages.decode(json.dumps(msgspec.to_builtins(WHOLE, str_keys=True)), Whole, "here") == WHOLE
    for message in (Start(0, 65535), Stop(1)):
        assert messages.decode(messages.encode(message), Start | Stop, "here") == message
    assert messages.decode("[1, null]", list[int | None], "here") == [1, None]
    assert messages.decode("3", float | None, "here") == 3.0
    assert messages.encode([float("nan")]) == b"[null]"


def test_texts_that_are_not_utf_8() -> None:
    """Paths and variables of another encoding arrive as they were, and change nothing about the checks."""
    part = Part("caf\udce9")
    data = messages.encode(part)
    assert messages.decode(data, Part, "here") == part
    assert messages.decode(json.dumps({"name": "caf\udce9"}), Part, "here") == part
    for refused in ('"size": NaN', '"size": 1e999', '"size": -Infinity', '"size": true', '"more": 1'):
        with pytest.raises(ForeignData):
            messages.decode(data[:-1] + f", {refused}}}".encode(), Part, "here")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "c"}, "Invalid enum value 'c'"),
        ({"count": True}, "Expected `int`, got `bool`"),
        ({"count": 1.0}, "Expected `int`, got `float`"),
        ({"count": float("nan")}, "no JSON|Expected `int`, got `float`"),
        ({"parts": {"name": "x"}}, "Expected `array`, got `object`"),
        ({"parts": [{"name": 1}]}, "Expected `str`, got `int`"),
        ({"parts": [{"name": "x" * 1001}]}, "length <= 1000"),
        ({"parts": [{}]}, "missing required field `name`"),
        ({"pairs": {"x": ["z", True]}}, "Expected `int`, got `str`"),
        ({"pairs": {"7": ["z"]}}, "length 2"),
        ({"__class__": "x"}, "unknown field `__class__`"),
    ],
)
def test_what_does_not_fit(change: dict[str, Any], why: str) -> None:
    fields = msgspec.to_builtins(WHOLE, str_keys=True) | change
    with pytest.raises(ForeignData, match=STATED) as caught:
        messages.decode(json.dumps(fields), Whole, "the store")
    assert any(each in str(caught.value) for each in why.split("|"))


@pytest.mark.parametrize(
    "data",
    [
        *(b"\x80\x04.", b"", b"[" * 100_000, b'{"rest":' * 100_000, b"{" * 10, b"9" * 10_000, b"\xff", b'"\xff"'),
        *(b"\xef\xbb\xbf{}", b"{}{}", b"NaN", b"1e999", b'"\\ud800' + b"[" * 100_000, b" " * (messages.MOST_BYTES + 1)),
        *(b'{"message":"Start"}', b'{"message":"Whole"}', b'{"message":[]}', b'{"rank":0,"port":1}'),
        *(b'{"message":"Start","rank":-1,"port":1}', b'{"message":"Start","rank":0,"port":65536}'),
        *(b'{"message":"Start","rank":0,"port":1,"delay":-1}', b'{"message":"Stop","pid":0}'),
        b'{"message":"Stop","pid":1,"bytes":9007199254740992}',
    ],
)
@pytest.mark.parametrize("shape", [Whole, Start | Stop])
def test_what_is_malformed(data: bytes, shape: Any) -> None:
    with pytest.raises(ForeignData, match=STATED):
        messages.decode(data, shape, "the store")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_one_field_that_somebody_else_wrote(data: st.DataObject) -> None:
    """It is read as what it is, or refused: no other exception, and no value of another type."""
    written = data.draw(st.sampled_from([WHOLE, Start(0, 1), Stop(1)]))
    fields = msgspec.to_builtins(written, str_keys=True)
    fields[data.draw(st.sampled_from([*fields, "else"]))] = data.draw(JSON)
    shape = type(written)
    try:
        found = messages.decode(json.dumps(fields), shape, "the store")
    except ForeignData:
        return
    assert messages.decode(messages.encode(found), shape, "the store") == found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.binary(max_size=60), st.integers(0, 300), st.integers(0, 300))
def test_bytes_that_somebody_else_wrote(noise: bytes, start: int, length: int) -> None:
    whole = messages.encode(WHOLE)
    for data in (noise, whole[:start] + noise + whole[start + length :]):
        try:
            messages.decode(data, Whole, "the store")
        except ForeignData:
            continue


@pytest.fixture
def own_secret() -> Iterator[None]:
    before = secret.text()
    secret.keep("01" * 32)
    yield
    secret.keep(before)


def refused(key: str, counter: int, data: bytes) -> str:
    with pytest.raises(ForeignData, match=STATED) as caught:
        messages.open_sealed(key, counter, data, "the store")
    return str(caught.value)


@pytest.mark.usefixtures("own_secret")
def test_seals() -> None:
    sealed = messages.seal("stop", 3, b"payload")
    assert messages.open_sealed("stop", 3, sealed, "the store") == b"payload"
    assert b"\n" not in messages.seal("stop", 3, b"")
    for key, counter in (("stop", 4), ("stop", -3), ("sto", 3), ("", 3)):
        assert "its seal is wrong" in refused(key, counter, sealed)
    for changed in (
        b"",
        b"payload",
        sealed[:-1],
        sealed + b"x",
        b"0" + sealed[1:],
        b"-" * 32 + b"payload",
        b"\xff" * 40,
    ):
        assert "its seal is wrong" in refused("stop", 3, changed)
    # What is moved from the key to the payload or back is no longer sealed.
    assert messages.seal("ab", 0, b"c")[:32] != messages.seal("a", 0, b"bc")[:32]
    secret.keep("02" * 32)
    assert "its seal is wrong" in refused("stop", 3, sealed)


@pytest.mark.usefixtures("own_secret")
def test_without_a_secret_nothing_is_sealed() -> None:
    sealed = messages.seal("stop", 3, b"payload")
    secret.keep(None)
    open_to_all = messages.seal("stop", 3, b"payload")
    assert messages.open_sealed("stop", 3, open_to_all, "the store") == b"payload"
    assert "it is sealed, and this process has no secret" in refused("stop", 3, sealed)
