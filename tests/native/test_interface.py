"""The border between Python and the C library: the same structs and numbers on both sides, and bad values refused."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
from collections.abc import Callable
from ctypes import c_double, c_int32, c_uint32, c_uint64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.errors import JoinError, UsageError
from phalanx.native import library
from phalanx.shm.node import tensors
from phalanx.shm.node.segment import Segment
from phalanx.status import layout
from tests.conftest import REPOSITORY

MIRRORS = {
    "phx_call": library.Call,
    "phx_signature": library.Signature,
    "phx_failure": library.Failure,
    "phx_log": library.Log,
}
RENAMED = {"input": "in", "output": "out", "inputs": "ins", "outputs": "outs"}
NUMBERS = {c_uint32: "uint32_t", c_int32: "int32_t", c_uint64: "uint64_t", c_double: "double"}
NOTE = ("before", "kind", "number", "size", "peer", "place", "queued", "started", "ended", "after")
FAILURES = ("NO_FAILURE", "BEING_WRITTEN", "MISMATCH", "SPLITS", "LOST", "LEFT", "TIMEOUT", "ABORTED")


def expected_structs() -> dict[str, int]:
    """Expressions in C, and what Python takes them for."""
    found: dict[str, int] = {"sizeof(phx_note)": layout.ENTRY_WORDS * layout.WORD}
    for struct, mirror in MIRRORS.items():
        found[f"sizeof({struct})"] = ctypes.sizeof(mirror)
        for name, kind, *_ in mirror._fields_:
            field, at = f"(({struct} *)0)->{RENAMED.get(name, name)}", getattr(mirror, name)
            found[f"(size_t)&{field}"], found[f"sizeof({field})"] = at.offset, at.size
            if kind in NUMBERS:
                found[f"_Generic({field}, {NUMBERS[kind]}: 1, default: 0)"] = 1
    kinds = {"Q": "uint64_t", "d": "double"}
    for index, (name, kind) in enumerate(zip(NOTE, layout.ENTRY_RECORD.format[1:], strict=True)):
        found[f"offsetof(phx_note, {name})"] = index * layout.WORD
        found[f"_Generic(+((phx_note *)0)->{name}, {kinds[kind]}: 1, default: 0)"] = 1
    return found


def expected_numbers() -> dict[str, int]:
    names = [name.upper() for name in (*library.OPS, "ops")], [*FAILURES]
    names += [name.upper() for name in (*tensors.REDUCE_NAMES, "reduces")], ["OK", "INTERRUPTED", "FAILED"]
    found = {f"PHX_{name}": number for several in names for number, name in enumerate(several)}
    found |= {f"PHX_{name}": number for number, name in enumerate((*library.REFUSALS, "RESULTS"), library.FAILED + 1)}
    short = [name.replace("float", "f").replace("uint", "u").replace("int", "i") for name in tensors.DTYPE_NAMES[:13]]
    found |= {f"PHX_{name.upper()}": code for code, name in enumerate((*short, "dtypes"))}
    found |= {f"PHX_{name}": getattr(library, name) for name in (*FAILURES, "VERSION", "MAX_RANKS")}
    return found


def test_python_and_the_compiler_agree_on_structs_and_numbers(tmp_path: Path) -> None:
    expected = expected_structs() | expected_numbers()
    lines = "".join(f'printf("%zu\\n", (size_t)({expression}));\n' for expression in expected)
    source = f'#include <stddef.h>\n#include <stdio.h>\n#include "phalanx_shm.h"\nint main(void) {{ {lines} }}\n'
    program = tmp_path / "layout"
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{REPOSITORY}/csrc", "-x", "c", "-"]
    subprocess.run([*command, "-o", str(program)], input=source, text=True, check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(expected, map(int, printed), strict=True)) == expected
    assert layout.ENTRY_RECORD.size == len(NOTE) * layout.WORD <= layout.ENTRY_WORDS * layout.WORD


class Memory:
    """A segment for one rank, or for two."""

    def __init__(self, ranks: int) -> None:
        self.lib = library.library()
        self.bytes = self.lib.phx_segment_bytes(ranks, 4096)
        self.memory = mmap.mmap(-1, self.bytes)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.words = (c_uint64 * 4).from_buffer(self.memory)  # magic, version and ranks, bytes, bytes of a slot
        self.lib.phx_format(self.base, ranks, 4096)
        self.arguments: dict[str, Any] = {
            "segment": self.base,
            "bytes": self.bytes,
            "rank": 0,
            "ranks": ranks,
            "pidfds": (ctypes.c_int * ranks)(*[-1] * ranks),
            "group": ctypes.byref(ctypes.c_void_p()),
        }

    def open(self, **changed: Any) -> str:
        return named(self.lib.phx_open(*(self.arguments | changed).values()))

    def handle(self) -> int:
        group = ctypes.c_void_p()
        assert self.open(group=ctypes.byref(group)) == "OK"
        assert group.value is not None
        return group.value


def named(result: int) -> str:
    return ("OK", "INTERRUPTED", "FAILED", *library.REFUSALS)[result]


def open_badly(_: int) -> list[tuple[str, str]]:
    """What was expected of phx_open, and what it returned."""
    memory = Memory(1)
    cases = {
        "NO_ARGUMENT": [{"segment": None}, {"pidfds": None}, {"group": None}],
        "UNALIGNED": [{"segment": memory.base + 8}],
        "BAD_RANK": [{"rank": -1}, {"rank": 1}, {"ranks": 0}, {"ranks": -1}, {"ranks": 257}, {"ranks": 1 << 30}],
        "BAD_SIZE": [{"bytes": 0}, {"bytes": memory.bytes - 1}, {"ranks": 2}],
        "BAD_PIDFD": [{"pidfds": (ctypes.c_int * 1)(1 << 20)}],
    }
    seen = [(name, memory.open(**changed)) for name, several in cases.items() for changed in several]
    values = [("NOT_FORMATTED", 0, 0), ("OTHER_VERSION", 1, library.VERSION + 1 | 1 << 32), ("BAD_SIZE", 2, 1)]
    values += [("BAD_SIZE", 1, library.VERSION | 2 << 32)]
    values += [("BAD_SIZE", 3, slot) for slot in (0, 63, 8192, 1 << 63, (1 << 64) - 64)]
    for name, word, value in values:
        before, memory.words[word] = memory.words[word], value
        seen.append((name, memory.open()))
        memory.words[word] = before
    seen.append(("OK", memory.open()))
    segment: Any = SimpleNamespace(_lib=memory.lib, _base=memory.base, _bytes=memory.bytes)
    with pytest.raises(JoinError, match=r"rank 5 cannot use the memory of the group: a rank is out of range"):
        Segment._open_handle(segment, 5, [-1])
    return seen


def run_badly(_: int) -> list[tuple[str, str]]:
    memory = Memory(1)
    group, lib = memory.handle(), memory.lib
    data = (ctypes.c_float * 4)(1.0, 2.0, 3.0, 4.0)
    address, huge = ctypes.addressof(data), (1 << 64) // 4 + 1  # 4 bytes when it has overflowed
    addresses, splits = (ctypes.c_void_p * 1)(address), (c_uint64 * 1)(huge)
    good = {"op": library.ALL_REDUCE, "root": -1, "width": 4, "count": 4, "input": address, "output": address}
    rooted = library.REDUCE, library.BROADCAST, library.GATHER, library.SCATTER
    exchange = good | {"op": library.ALL_TO_ALL, "inputs": addresses, "outputs": addresses, "sends": (c_uint64 * 1)(4)}
    cases: dict[str, list[dict[str, Any]]] = {
        "BAD_OP": [{"op": len(library.OPS)}, {"op": (1 << 32) - 1}],
        "BAD_ROOT": [
            *({"root": 0}, {"op": library.BARRIER, "root": 0}),
            *({"op": op, "root": root} for op in rooted for root in (-1, 1, -(1 << 31))),
        ],
        "BAD_WIDTH": [{"width": 0}, {"width": 8}, {"op": library.ALL_GATHER, "dtype": 99, "width": 0}],
        "BAD_REDUCTION": [{"reduce": 5}, {"reduce": 9}, {"reduce": (1 << 32) - 1}, {"dtype": 13}, {"dtype": 1 << 31}],
        "BAD_COUNT": [
            *({"count": huge}, {"count": 1 << 61}, {"sends": splits}),
            *(exchange | {"sends": splits}, exchange | {"receives": splits}),
        ],
        "NO_DATA": [
            *({"input": None}, {"output": None}, exchange | {"inputs": None}),
            exchange | {"outputs": (ctypes.c_void_p * 1)(None)},
        ],
    }

    def run(fields: dict[str, Any]) -> str:
        call = library.Call(**fields)
        return named(lib.phx_run(group, ctypes.addressof(call)))

    seen = [(name, run(good | changed)) for name, several in cases.items() for changed in several]
    seen += [("NO_ARGUMENT", named(lib.phx_run(*pair))) for pair in ((None, None), (group, None))]
    seen += [("NO_ARGUMENT", named(lib.phx_resume(None))), ("BAD_ORDER", named(lib.phx_resume(group)))]
    seen += [("OK", run(good)), ("OK", run(good | {"timeout_ns": (1 << 64) - 1})), ("OK", run(exchange))]
    seen += [("BAD_ORDER", named(lib.phx_resume(group)))]
    assert list(data) == [1.0, 2.0, 3.0, 4.0]
    segment: Any = SimpleNamespace(_lib=lib, handle=group)
    with pytest.raises(UsageError, match=r"^operation 99 was refused: there is no such operation\. Nothing has been"):
        Segment.run(segment, library.Call(op=99))
    return seen


def run_while_one_is_interrupted(_: int) -> list[tuple[str, str]]:
    memory = Memory(2)
    group, lib = memory.handle(), memory.lib
    barrier = library.Call(op=library.BARRIER, root=-1, timeout_ns=library.nanoseconds(1e300))
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    seen = [("INTERRUPTED", named(lib.phx_run(group, ctypes.addressof(barrier))))]
    signal.setitimer(signal.ITIMER_REAL, 0)
    seen.append(("BAD_ORDER", named(lib.phx_run(group, ctypes.addressof(barrier)))))
    lib.phx_abort(group)
    return [*seen, ("FAILED", named(lib.phx_run(group, ctypes.addressof(barrier))))]


def run_while_a_signal_comes_before_the_sleep(_: int) -> list[tuple[str, str]]:
    """A signal while the wait still yields the core ends no sleep, and its handler must run all the same."""
    memory = Memory(2)
    group, lib = memory.handle(), memory.lib
    barrier = library.Call(
        op=library.BARRIER, root=-1, timeout_ns=library.nanoseconds(20.0), yield_microseconds=200_000
    )
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    seen = [("INTERRUPTED", named(lib.phx_run(group, ctypes.addressof(barrier))))]
    lib.phx_abort(group)
    return seen


@pytest.mark.parametrize(
    "check", [open_badly, run_badly, run_while_one_is_interrupted, run_while_a_signal_comes_before_the_sleep]
)
def test_bad_values_are_refused_and_nothing_crashes(check: Any, run_ranks: Callable[..., list[Any]]) -> None:
    [seen] = run_ranks(check, 1, join_group=False)
    assert [found for _, found in seen] == [expected for expected, _ in seen], seen
