"""The files of a checkpoint: others can read them, nothing in them is executed, and whatever is damaged is skipped."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from pprint import pformat
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import phalanx as px
from phalanx.checkpoint import command
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.storage import manifest, shard_file, values
from phalanx.checkpoint.storage.local import LocalStorage
from phalanx.checkpoint.storage.manifest import Broken
from phalanx.errors import CheckpointError, UsageError


class Foreign:
    """A class of the user's."""

    def __init__(self, number: int) -> None:
        self.number = number


# ---- plain values

PLAIN: list[Any] = [
    None, True, 0, -(2**80), 1.5, -0.0, float("inf"), "a\0é\ud800", [], [1, [2]], (), (1, (2, [3])), {},
    {"a": {"b": 1}}, {1: 2, (1, "x"): 3, None: 4}, {"$tuple": [1]}, {"$": 1, "a": 2}, b"\0\xff", bytearray(b"x"),
    {1, 2}, frozenset("ab"), 1 + 2j, torch.Size([2, 3]), deque([1, 2], maxlen=5), Counter({4: 1, 9: 2}),
    OrderedDict(z=1, a=(2,)), np.float32(0.1), np.int64(-3), np.bool_(True), random.getstate(),
    {"deep": [{"er": ({"x": {3.5}},)}]},
]  # fmt: skip


def test_plain_values_come_back_as_they_were() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("nothing but JSON is needed for it")

    for value in PLAIN:
        text = json.dumps(values.encode(value, ("extra",), refuse), allow_nan=False)
        again = values.Decoder(refuse, refuse).decode(json.loads(text))
        assert again == value
        assert type(again) is type(value)
        assert pformat(again, sort_dicts=False) == pformat(value, sort_dicts=False)  # A set has no order of its own.


DAMAGED: list[Any] = [
    {"$tuple": 5}, {"$set": [[]]}, {"$bytes": "%%"}, {"$bytes": 3}, {"$float": "x"}, {"$float": [1]}, {"$dict": [1]},
    {"$dict": [[[], 1]]}, {"$scalar": ["O", "AAAA"]}, {"$scalar": ["<f4", ""]}, {"$scalar": 1}, {"$size": ["x"]},
    {"$deque": [[1], "x"]}, {"$deque": 3}, {"$complex": [1]}, {"$ordered": [5, None]}, {"$nosuch": 1}, {"$eval": "1"},
    {"$counter": "ab"}, {"$tensor": 5},
]  # fmt: skip


def test_whatever_was_not_encoded_is_damaged() -> None:
    for node in DAMAGED:
        with pytest.raises(Broken):
            values.Decoder(lambda name: torch.zeros(1), lambda _: None).decode({"a": [node]})


def test_values_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match="is nested more than 64 deep"):
        px.Checkpointer(tmp_path).save(1, extra={"loop": loop})
    deep: Any = 1
    for _ in range(500):
        deep = [deep]
    decoder = values.Decoder(lambda name: torch.zeros(1), lambda _: None)
    with pytest.raises(Broken, match="nested too deep"):
        decoder.decode(deep)
    for kind in (lambda each: {1: each}, lambda each: OrderedDict(a=each), lambda each: (each,)):
        deep = 1
        for _ in range(63):
            deep = kind(deep)
        assert decoder.decode(values.encode(deep, ("extra",), lambda *_: None)) == deep


def test_no_checkpoint_is_published_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(manifest, "_MOST_BYTES", 1 << 16)
    checkpointer = px.Checkpointer(tmp_path, asynchronous=False)
    for extra in ({"much": bytes(1 << 16)}, {"number": 10**5000}):
        with pytest.raises(CheckpointError, match=r"at most 65\.5 kB|4300 digits"):
            checkpointer.save(1, extra=extra)
    with pytest.raises(UsageError, match="step is 1000000000000000000; give"):
        checkpointer.save(10**18)
    assert checkpointer.steps() == []
    monkeypatch.setattr(Catalog, "prune", lambda *_: {}["no OSError"])
    checkpointer.save(2)
    assert checkpointer.steps() == [2]
    assert "step 2 is saved, but an old checkpoint in" in capsys.readouterr().err
    checkpointer.close()


def test_whole_numbers_of_numpy_and_torch_are_steps_and_counts(tmp_path: Path) -> None:
    state = px.State(step=torch.tensor(2))  # type: ignore[arg-type]
    with px.Checkpointer(tmp_path, keep=np.int64(2)) as checkpointer:  # type: ignore[arg-type]
        for step in (np.int32(0), np.int64(1), state):
            checkpointer.save(step)  # type: ignore[arg-type]
        assert checkpointer.steps() == [1, 2]
        assert checkpointer.load(np.int64(1)).step == 1  # type: ignore[arg-type]


# ---- files that others read


def test_every_type_is_read_back_by_us_and_by_safetensors(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for dtype in shard_file.DTYPE_NAMES:
        content = torch.randint(0, 2, (3, 16), generator=generator, dtype=torch.uint8)
        tensors[str(dtype)] = content.view(dtype) if dtype != torch.bool else content.bool()
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "turned": torch.arange(6.0).view(2, 3).T}
    given = {**tensors, "array": np.arange(5, dtype=np.uint16), "a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    with px.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, extra=given)
    state = px.Checkpointer(tmp_path).load_latest()
    assert state is not None
    with safe_open(tmp_path / "step-1" / "rank-0.safetensors", "pt") as file:
        for name, tensor in tensors.items():
            for found in (state.extra[name], file.get_tensor(f"extra.{name}")):
                assert found.dtype == tensor.dtype
                assert found.shape == tensor.shape
                plain = found.contiguous().reshape(-1).view(torch.uint8)
                assert torch.equal(plain, tensor.contiguous().reshape(-1).view(torch.uint8)), name
    assert (state.extra["array"] == given["array"]).all()
    assert state.extra["array"].dtype == np.uint16
    assert (state.extra["a"]["b"].item(), state.extra["a.b"].item()) == (1, 0)


def test_objects_need_trust(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"extra\['it'\]\[0\] is an object of class .*Foreign, .*trust=True"):
        px.Checkpointer(tmp_path).save(1, extra={"it": [Foreign(3)]})
    with px.Checkpointer(tmp_path, trust=True) as checkpointer:
        checkpointer.save(1, model=nn.Linear(2, 2), extra={"it": [Foreign(3)]})
    state = px.State(model=nn.Linear(2, 2), extra={"it": None})
    with pytest.raises(CheckpointError, match=r"step-1 in .* has objects that were pickled, .* Give trust=True"):
        px.Checkpointer(tmp_path).load_latest(state)
    model_alone = px.Checkpointer(tmp_path).load_latest(model=nn.Linear(2, 2))
    assert model_alone is not None
    assert model_alone.extra == {}, "nobody has asked for it, and it would run code"
    px.Checkpointer(tmp_path, trust=True).load_latest(state)
    assert state.extra["it"][0].number == 3
    assert command.main(["export", str(tmp_path), str(tmp_path / "w.safetensors")]) == 0  # no object of the model


def test_no_pickle_is_opened_without_trust(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    with px.Checkpointer(tmp_path, trust=True) as checkpointer:
        checkpointer.save(1, extra={"it": Payload()})
    for words in (["verify", str(tmp_path)], ["ls", str(tmp_path)]):
        assert command.main(words) == 0
    with pytest.raises(CheckpointError, match="trust"):
        px.Checkpointer(tmp_path).load_latest(extra={"it": None})
    assert not (tmp_path / "owned").exists()
    px.Checkpointer(tmp_path, trust=True).load_latest(extra={"it": None})
    assert (tmp_path / "owned").exists()


# ---- damage that a checksum does not show


def fact(content: bytes) -> dict[str, int]:
    return {"bytes": len(content), "crc32": zlib.crc32(content)}


def rewrite(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest with another content and the right checksum."""
    fields = json.loads((step / "manifest.json").read_bytes())
    del fields["check"]
    change(fields)
    fields["check"] = manifest._check(fields)
    (step / "manifest.json").write_text(json.dumps(fields))


def _set(*keys: Any) -> Callable[[dict[str, Any]], object]:
    *path, last, value = keys

    def change(fields: Any) -> None:
        for key in path:
            fields = fields[key]
        fields[last] = value

    return change


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no step": lambda fields: fields.pop("step"),
    "step of another type": _set("step", "5"),
    "negative step": _set("step", -1),
    "true as a step": _set("step", True),
    "another step": _set("step", 9),
    "no files": lambda fields: fields.pop("files"),
    "files as a list": _set("files", []),
    "a path as a file": lambda fields: fields["files"].update({"../../etc/passwd": {"bytes": 1, "crc32": 1}}),
    "sizes below zero": _set("files", "rank-0.safetensors", "bytes", -5),
    "more fields of a file": _set("files", "rank-0.safetensors", "more", 1),
    "no version": lambda fields: fields.pop("version"),
    "version as a float": _set("version", 2.0),
    "a later version": _set("version", 3),
    "an earlier version": _set("version", 1),
    "nobody saved it": _set("world_size", 0),
    "too many ranks": _set("world_size", 10**30),
    "parts as a number": _set("parts", 5),
    "time as a text": _set("time", "now"),
    "no random generators": _set("rng", []),
    "random generators of another kind": _set("rng", [{"python": 1}]),
    "values as a list": _set("values", []),
    "a type nobody knows": _set("tensors", "model.weight", 0, "F99"),
    "a huge shape": _set("tensors", "model.weight", 1, [10**9, 10**9]),
    "a negative shape": _set("tensors", "model.weight", 1, [-4, -3]),
    "another shape": _set("tensors", "model.weight", 1, [3, 4]),
    "rows of nobody": _set("tensors", "model.weight", 2, [[7, 0, 4]]),
    "rows twice": _set("tensors", "model.weight", 2, [[0, 0, 4], [0, 0, 4]]),
    "rows missing": _set("tensors", "model.weight", 2, [[0, 0, 1]]),
    "tensors as text": _set("tensors", "model.weight", "weight"),
    "a value of a tensor that is not there": _set("values", "model", "$ordered", 0, 0, 1, {"$tensor": "model.no"}),
    "a model of another kind": _set("values", "model", 5),
    "a value nobody knows": _set("values", "extra", {"$nosuch": 1}),
    "extra as a number": _set("values", "extra", 5),
    "a shape that no tensor can have": _set("tensors", "extra.none", 1, [0, 2**47, 2**47]),
    "no optimizer": lambda fields: fields["values"].pop("optimizer"),
    "an optimizer of another kind": _set("values", "optimizer", 5),
    "an optimizer without groups": lambda fields: fields["values"]["optimizer"].pop("param_groups"),
    "groups of another kind": _set("values", "optimizer", "param_groups", [3]),
    "a group's parameters as a number": _set("values", "optimizer", "param_groups", 0, "params", 5),
    "parameters that are no names": _set("values", "optimizer", "param_groups", 0, "params", [[], []]),
    "an optimizer's state of another kind": _set("values", "optimizer", "state", []),
    "values that share a tensor": _set("values", "extra", {"a": {"$tensor": "model.weight"}}),
}
HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no tensor": lambda header: header.pop("model.weight"),
    "offsets beyond the file": _set("model.weight", "data_offsets", [0, 10**12]),
    "offsets that overlap": _set("model.weight", "data_offsets", [4, 52]),
    "offsets as texts": _set("model.weight", "data_offsets", ["a", "b"]),
    "another type": _set("model.weight", "dtype", "I32"),
    "a type nobody knows": _set("model.weight", "dtype", "X"),
    "another shape": _set("model.weight", "shape", [3, 4]),
}


NO_MANIFESTS = (b"null", b"[" * 200_000, b'{"check": ' + b"9" * 5000 + b"}", b"\xff\xfe", b'{"a": NaN}')


def change_header(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = (step / "rank-0.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    again = json.dumps(header).encode()
    evil = len(again).to_bytes(8, "little") + again + content[8 + length :]
    (step / "rank-0.safetensors").write_bytes(evil)
    rewrite(step, lambda fields: fields["files"].update({"rank-0.safetensors": fact(evil)}))


def test_a_manifest_or_header_of_any_other_form_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, kept = tmp_path / "run", tmp_path / "kept"
    with px.Checkpointer(path) as checkpointer:
        for step in (1, 2):
            model = nn.Linear(3, 4)
            optimizer = torch.optim.SGD(model.parameters())
            checkpointer.save(step, model=model, optimizer=optimizer, extra={"x": 1, "none": torch.zeros(0, 2)})
    shutil.copytree(path / "step-2", kept)
    damages: dict[str, Callable[[Path], object]] = {}
    for name, change in MANIFESTS.items():
        damages[f"manifest: {name}"] = functools.partial(rewrite, change=change)
    for name, change in HEADERS.items():
        damages[f"header: {name}"] = functools.partial(change_header, change=change)
    for content in NO_MANIFESTS:
        damages[f"{content[:12]!r}"] = lambda step, content=content: (step / "manifest.json").write_bytes(content)
    for name, damage in damages.items():
        damage(path / "step-2")
        state = px.Checkpointer(path).load_latest(model=model, optimizer=optimizer)
        assert state is not None, name
        assert state.step == 1, name
        assert capsys.readouterr().err.count("skipped the checkpoint step-2") == 1, name
        shutil.rmtree(path / "step-2")
        shutil.copytree(kept, path / "step-2")
    assert px.Checkpointer(path).load_latest().step == 2  # type: ignore[union-attr]


# ---- who may read them


@pytest.mark.parametrize(
    ("umask", "mode", "want"),
    [(0o022, None, 0o600), (0o002, None, 0o600), (0o027, None, 0o640), (0o077, None, 0o600), (0o077, 0o644, 0o644)],
)
def test_files_are_the_owners_unless_umask_or_mode_say_otherwise(
    tmp_path: Path, umask: int, mode: int | None, want: int
) -> None:
    before = os.umask(umask)
    try:
        with px.Checkpointer(tmp_path / "a" / "run", mode=mode) as checkpointer:
            checkpointer.save(1, model=nn.Linear(2, 2))
            checkpointer.wait()
            modes = {
                each: each.stat().st_mode & 0o777 for each in [tmp_path / "a/run", *(tmp_path / "a/run").rglob("*")]
            }
    finally:
        os.umask(before)
    assert len(modes) == 5  # the path, the lock, the step, and two files
    for each, found in modes.items():
        assert found == (want | (want & 0o444) >> 2 if each.is_dir() else want), each
    with pytest.raises(UsageError, match="mode="):
        px.Checkpointer(tmp_path, mode=0o444)


def test_the_umask_of_the_process_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads may be creating files."""
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, "umask", lambda _: pytest.fail("the umask was set"))
            assert LocalStorage(str(tmp_path))._mode == 0o666
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_text", lambda *_: "")  # where /proc does not have it
            assert LocalStorage(str(tmp_path))._mode == 0o666
    finally:
        assert os.umask(before) == 0o027


# ---- words


def test_what_makes_no_sense_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer: Any = px.Checkpointer(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: px.Checkpointer(None),  # type: ignore[arg-type]
        lambda: px.Checkpointer(5),  # type: ignore[arg-type]
        lambda: px.Checkpointer(b"bytes"),  # type: ignore[arg-type]
        lambda: px.Checkpointer("a\0b"),
        lambda: px.Checkpointer(tmp_path, keep="3"),  # type: ignore[arg-type]
        lambda: px.Checkpointer(tmp_path, keep=1.5),  # type: ignore[arg-type]
        lambda: checkpointer.load_latest("x"),
        lambda: checkpointer.load_latest(5),
        lambda: checkpointer.load("x"),
        lambda: checkpointer.save("x"),
        lambda: checkpointer.save(1.0),
        lambda: checkpointer.save(None),
        lambda: checkpointer.save(1, extra=[1]),
        lambda: checkpointer.save(1, model="x"),
    ]
    for call in calls:
        with pytest.raises(UsageError) as caught:
            call()
        assert len(str(caught.value)) < 250
        assert caught.value.__cause__ is None
    with px.Checkpointer(tmp_path) as another:
        another.save(1)
    assert command.main(["verify", str(tmp_path)]) == 0
    assert "It does not prove who wrote it" in capsys.readouterr().out
