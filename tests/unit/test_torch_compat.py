"""torch's private names: each can be missing, and only torch_compat touches them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from torch.nn import Module

import phalanx
from phalanx.torch_compat import c10d, dataloader, dynamo, nn, release
from phalanx.torch_compat.names import by_area
from tests.unit import without_a_name

SOURCE = Path(phalanx.__file__).parent
REPOSITORY = SOURCE.parents[1]
PYTHONS_OWN = {
    "argparser.py": {"_option_string_actions"},  # argparse
    "launch/flags.py": {"_option_string_actions"},
    "launch/process/pickled_function.py": {"_config"},  # multiprocessing
}
NEEDED_BY_SHM = {
    str(name)
    for name in (
        *(c10d.NEW_GROUP, c10d.WORLD, c10d.SET_DEFAULT_BACKEND, c10d.REGISTER_BACKEND),
        *(c10d.GLOO_OPTIONS, c10d.GLOO_OPTIONS_TIMEOUT, c10d.GLOO_OPTIONS_DEVICES),
    )
}
PRIVATE_MODULE = re.compile(r"torch(\.\w+)*[./]_[a-z]\w*([./]\w+)*(:[\w.]+)?")


def test_a_name_that_is_missing_turns_off_its_feature_alone(tmp_path: Path) -> None:
    """Each in turn, in a fork of one process that has torch: no exception, and one line in the rank's event file."""
    program = [sys.executable, without_a_name.__file__, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    names = {str(name): area for area, of in by_area().items() for name in of}
    assert set(found) == {*names, *(f"nothing of {area}" for area in by_area())}
    for name, area in names.items():
        whole, without = found[f"nothing of {area}"], found[name]
        assert (whole["error"], whole["events"], whole["off"]) == (None, [], []), (area, whole)
        assert without["error"] is None, (name, without["error"])
        assert [(event["event"], event["name"]) for event in without["events"]] == [("feature off", f"{name}_gone")]
        assert without["off"] == ([f"{name}_gone"] if name in whole["on"] else []), name
        assert without["group"] == (whole["group"] and "ProcessGroup" if name in NEEDED_BY_SHM else whole["group"]), (
            name
        )
        assert set(without["on"]) <= set(whole["on"]) - {name}, name


def test_every_name_is_there() -> None:
    """In the torch that is installed; `make test-torch` runs it with others."""
    objects = {nn.METADATA: Module().state_dict(), **dict.fromkeys((nn.PARAMETERS, nn.BUFFERS, nn.CHILDREN), Module())}
    only_when_made = {dataloader.WORKERS, dynamo.COMPILED}  # the test above makes a loader; see test_compiled_ddp
    for name in (name for of in by_area().values() for name in of if name.since and release() >= name.since):
        found = name.of(objects[name]) if name in objects else name in only_when_made or name.get()
        assert found is not None, name


def test_it_is_a_leaf() -> None:
    for path in (SOURCE / "torch_compat").glob("*.py"):
        found = {of for of in dict(_imported(ast.parse(path.read_text()))).values() if of.startswith("phalanx.")}
        assert {of.split(".")[1] for of in found} <= {"errors", "events", "run_files", "torch_compat"}, path.name


def test_only_torch_compat_touches_what_is_private_in_torch() -> None:
    trees = {path.relative_to(SOURCE): ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    ours = {name for tree in trees.values() for name in _defined(tree)}
    known = {name.attribute for of in by_area().values() for name in of if name.attribute.startswith("_")}
    for path, tree in trees.items():
        if path.parts[0] != "torch_compat":
            found = {name for name in _touched(tree, ours, known) if name not in PYTHONS_OWN.get(path.as_posix(), ())}
            assert not found, f"{path}: {', '.join(sorted(found))} belongs into torch_compat"


def test_the_scan_finds_what_it_is_for() -> None:
    for code in (
        "import torch.distributed as dist\ndist._world",
        "from torch.distributed import distributed_c10d as c10d\nc10d.thing()._private",
        "from torch.utils._pytree import tree_map",
        "import torch._dynamo",
        "import_module('torch._C._dynamo')",
        "def f(tensor): return tensor._version",
        "def f(state): return getattr(state, '_metadata', None)",
        "from torch import nn\nnn.Module.load_state_dict = None",
        "import torch\nsetattr(torch.Tensor, 'backward', None)",
        "class Group(ProcessGroup):\n  def f(self): self._register_backend(1)",
    ):
        assert set(_touched(ast.parse(code), {"_version"}, {"_version", "_metadata"})), code
    for code in ("import os\nos._exit(0)", "class A:\n  def f(self): self._own", "import torch\ntorch.ones(1)"):
        assert not set(_touched(ast.parse(code), {"_own"}, {"_version"})), code


def test_the_page_of_names_is_current() -> None:
    program = [sys.executable, str(REPOSITORY / "tools/torch_internals.py")]
    page = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout
    assert (REPOSITORY / "docs/torch-internals.md").read_text() == page, "run tools/torch_internals.py"


def _defined(tree: ast.AST) -> Iterator[str]:
    """What a module of ours itself calls its functions, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _touched(tree: ast.AST, ours: set[str], known: set[str]) -> Iterator[str]:
    """Private names that are torch's by the import, that are in the table, or that are nobody's; and what is replaced.

    Args:
        ours: names that our own modules define.
        known: private names of torch.
    """
    modules = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from (name for each in node.names if _is_private(name := start + each.name))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in known or PRIVATE_MODULE.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if modules.get(_root(node.args[0]), "").startswith("torch"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            of, is_self = modules.get(_root(node), ""), _root(node.value) == "self" and isinstance(node.value, ast.Name)
            if of.partition(".")[0] == "torch" and isinstance(node.ctx, ast.Store):
                yield ast.unparse(node)
            elif node.attr.startswith("_") and not node.attr.startswith("__"):
                is_python = of.partition(".")[0] in sys.stdlib_module_names
                if not is_python and (
                    of.startswith("torch") or node.attr not in ours or (node.attr in known and not is_self)
                ):
                    yield node.attr


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (((each.asname or each.name).partition(".")[0], each.name) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((each.asname or each.name, f"{node.module}.{each.name}") for each in node.names)


def _is_private(name: str) -> bool:
    return name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))


def _root(node: ast.AST) -> str:
    """The name with which an expression begins."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
