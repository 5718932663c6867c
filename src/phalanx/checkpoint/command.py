"""``phalanx checkpoint``: lists, verifies and exports checkpoints. Only `export` imports torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from phalanx.argparser import Parser
from phalanx.checkpoint.catalog import Catalog, Entry
from phalanx.checkpoint.storage.base import open_storage
from phalanx.errors import CheckpointError
from phalanx.system import in_decimal_bytes

_DESCRIPTION = "Look at the checkpoints of px.Checkpointer, check them, and take the weights out."
_NOT_PROVED = (
    "whole: every byte is the one that was written. It does not prove who wrote it, or that it fits your model."
)


def main(argv: list[str]) -> int:
    """Runs ``phalanx checkpoint``; returns the exit code: 1 if a checkpoint is damaged."""
    arguments = _parser().parse_args(argv)
    return arguments.work(arguments)


def _parser() -> Parser:
    parser = Parser(prog="phalanx checkpoint", description=_DESCRIPTION, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, work, words in (
        ("ls", _list, "the checkpoints of a directory, without reading them"),
        ("verify", _verify, "read every byte and compare it with what was written"),
        ("export", _export, "the weights of the newest as one safetensors file"),
    ):
        command = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        command.set_defaults(work=work)
        command.add_argument("path", metavar="PATH", help="the directory given to px.Checkpointer, or one of its steps")
        if name == "export":
            command.add_argument("out", metavar="OUT.safetensors", type=Path)
            command.add_argument("--trust", action="store_true", help="also from checkpoints whose loading runs code")
        else:
            command.add_argument("--json", action="store_true", help="for programs")
        if name != "ls":
            command.add_argument("--step", metavar="N", type=int, help="only this step")
    return parser


def _list(arguments: argparse.Namespace) -> int:
    _, entries = _find(arguments.path, None)
    if arguments.json:
        print(json.dumps([_fields(entry) for entry in entries], indent=1))
        return 0
    for entry in entries:
        print(f"{entry.directory:<14}  {_describe(entry)}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    catalog, entries = _find(arguments.path, arguments.step)
    found = []
    for entry in entries:
        problem = catalog.verify(entry)
        found.append({**_fields(entry), "problem": problem})
        if not arguments.json:
            print(f"{entry.directory:<14}  {f'damaged: {problem}' if problem else f'whole, {_size(entry)}'}")
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(_NOT_PROVED)
    return 1 if any(each["problem"] for each in found) else 0


def _export(arguments: argparse.Namespace) -> int:
    catalog, entries = _find(arguments.path, arguments.step)
    for entry in entries:
        if problem := catalog.verify(entry):
            print(f"phalanx: skipped the checkpoint {entry.directory}: {problem}", file=sys.stderr)
            continue
        from phalanx.checkpoint.load import export

        count = export(catalog.storage, entry, arguments.out, arguments.trust)
        print(f"{arguments.out}: {count} tensors of step {entry.step}")
        return 0
    raise CheckpointError(f"{arguments.path} has no whole checkpoint to export.")


def _find(path: str, step: int | None) -> tuple[Catalog, list[Entry]]:
    """Returns the checkpoints that the arguments name, newest first; at least one."""
    parent, name = os.path.split(path.rstrip("/"))
    if re.fullmatch(r"step-\d+(\.[0-9a-f]+)?", name):
        catalog = Catalog(open_storage(parent or "."))
        entries = [entry for entry in catalog.entries() if entry.directory == name]
    else:
        catalog = Catalog(open_storage(path))
        entries = catalog.entries()
    if not entries:
        raise CheckpointError(f"there is no checkpoint in {path}; give the path that px.Checkpointer was given.")
    chosen = [entry for entry in entries if step is None or entry.step == step]
    if not chosen:
        there = ", ".join(str(entry.step) for entry in reversed(entries))
        raise CheckpointError(f"{path} has no checkpoint of step {step}; there are: {there}.")
    return catalog, chosen


def _fields(entry: Entry) -> dict[str, object]:
    fields: dict[str, object] = {"step": entry.step, "directory": entry.directory, "problem": entry.problem}
    if (manifest := entry.manifest) is not None:
        fields |= {"time": manifest.time, "bytes": manifest.bytes, "world_size": manifest.world_size}
        fields |= {"parts": manifest.parts, "phalanx": manifest.phalanx, "torch": manifest.torch}
    return fields


def _describe(entry: Entry) -> str:
    if (manifest := entry.manifest) is None:
        return f"damaged: {entry.problem}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
    ranks = f"{manifest.world_size} rank{'s' * (manifest.world_size > 1)}"
    return f"{when}  {_size(entry):>10}  {ranks:>8}  {', '.join(manifest.parts)}"


def _size(entry: Entry) -> str:
    assert entry.manifest is not None
    return in_decimal_bytes(entry.manifest.bytes)
