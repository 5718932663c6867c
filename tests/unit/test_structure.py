"""How the package is put together: which package may import which, which import torch, how large a directory is."""

from __future__ import annotations

import ast
import functools
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import phalanx

SOURCE = Path(phalanx.__file__).parent
MOST_MODULES = 16

LEAVES = set(
    """
    argparser attempt cluster devices entry_point env errors events fd_channel messages native run_files secret
    source_lines status store system torch_compat
    """.split()
)
"""Every package may import these; they import only each other."""

EDGES = {
    "backends": {"shm"},  # the only one that loads it
    "bench": {"backends", "launch.process"},
    "checkpoint": {"checkpoint.storage", "preemption", "world"},
    "checkpoint.storage": set(),
    "cli": {"bench", "checkpoint", "diagnose", "diagnose.doctor", "launch", "self_test", "watchdog.stall"},
    "comm": {"world"},
    "data": {"world"},
    "diagnose": {"failure", "watchdog.stall", "watchdog.straggler"},  # files and records, never live objects
    "diagnose.doctor": set(),
    "failure": set(),
    "launch": {"failure", "launch.agent", "launch.process", "launch.remote", "launch.spec"},
    "launch.agent": {
        *("failure", "launch.multinode", "launch.output", "launch.process", "launch.spec"),
        *("preemption", "watchdog", "watchdog.stall", "watchdog.straggler"),
    },
    "launch.multinode": {"launch.spec", "watchdog"},
    "launch.output": set(),
    "launch.process": {"failure", "launch.multinode", "launch.spec", "preemption"},
    "launch.remote": {"launch.agent", "launch.output", "launch.process", "launch.spec"},
    "launch.spec": set(),
    "parallel": {"backends", "failure", "world"},
    "preemption": {"watchdog"},
    "recorder": {"preemption"},
    "self_test": {"phalanx"},  # as a script would
    "shm": {"shm.hierarchical", "shm.node"},
    "shm.hierarchical": {"shm.node"},
    "shm.node": set(),
    "testing": {"launch", "launch.process", "launch.spec", "parallel", "phalanx", "world"},
    "train": {"comm", "preemption", "world"},
    "watchdog": {"failure"},
    "watchdog.stall": {"watchdog"},
    "watchdog.straggler": {"watchdog"},
    "world": {"backends"},
}
"""A package, and those it may import beside the leaves. A module directly below phalanx stands for itself."""

WITH_TORCH = {
    *("launch/process/fresh_modules", "launch/spawn"),  # spawn only to raise the exceptions of mp.spawn
    # the next are the keeper's
    *("launch/multinode/elastic", "launch/multinode/elastic_state", "launch/multinode/rendezvous"),
    *("launch/multinode/keeper_session",),
}
"""The modules of the launcher that import torch, in the processes that have it."""

WITHOUT_TORCH_IN_CHECKPOINT = """
command catalog storage/base storage/fsspec storage/local storage/manifest
""".split()
"""What `phalanx checkpoint ls` and `verify` need."""


def imports_torch(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(name.partition(".")[0] in ("torch", "numpy") for name in names):
            return True
    return False


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in SOURCE.rglob("*.py")}


def package(module: str) -> str:
    """Of a module, without ``phalanx.``."""
    is_package = modules()[module].name == "__init__.py"
    name = module if is_package else module.rpartition(".")[0]
    return (module if name == "phalanx" else name).removeprefix("phalanx.")


def imported(path: Path) -> Iterator[str]:
    """The modules of ours that one imports, wherever in its code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "phalanx":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules() else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())


@functools.cache
def edges() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, path in modules().items():
        own = package(module)
        found.setdefault(own, set()).update({package(other) for other in imported(path)} - {own})
    return found


def test_a_directory_has_at_most_16_modules() -> None:
    count = Counter(path.parent for path in modules().values() if path.stem not in ("__init__", "__main__"))
    assert {str(path): number for path, number in count.items() if number > MOST_MODULES} == {}


def test_the_table_of_imports() -> None:
    found = {own: others - LEAVES for own, others in edges().items() if own not in ("phalanx", "__main__", *LEAVES)}
    assert found == EDGES


def test_leaves_import_only_leaves() -> None:
    for leaf in LEAVES:
        assert edges()[leaf] <= LEAVES, leaf


def test_no_two_packages_import_each_other() -> None:
    pairs = {tuple(sorted((a, b))) for a, others in edges().items() for b in others if a in edges().get(b, ())}
    assert pairs == set()


def test_only_the_named_modules_of_the_launcher_import_torch() -> None:
    paths = [path for package in ("launch", "watchdog", "failure") for path in (SOURCE / package).rglob("*.py")]
    found = {path.relative_to(SOURCE).with_suffix("").as_posix() for path in paths if imports_torch(path)}
    assert found == WITH_TORCH


def test_diagnose_imports_no_torch() -> None:
    assert [path for path in (SOURCE / "diagnose").rglob("*.py") if imports_torch(path)] == []


def test_checkpoints_can_be_listed_without_torch() -> None:
    for name in WITHOUT_TORCH_IN_CHECKPOINT:
        assert not imports_torch(SOURCE / "checkpoint" / f"{name}.py"), name


MOST_LINES = 34_360
"""Of Python in the package, 2,000 of them for GPUs and 1,600 for preemption: never more without a reason."""
MOST_LINES_OF_A_MODULE = 300
MOST_ANY = 150

NOT_NAMES = set(
    """
    alarm card cards clerk company council court crew dice disguise docket dossier envoy hearing hindsight lane lookout
    luggage muster nursery outpost outposts passage patience rails sacrifice sentries sentry shelf testimony tidings
    vigil voice whereabouts
    """.split()
)
"""Words that no name in the package contains: an engineer of this field would not search for them."""


def names(path: Path) -> set[str]:
    """All identifiers of a module, and its own name."""
    with path.open("rb") as file:
        return {path.stem, *(token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME)}


def words(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")


def test_names_are_words_of_the_field() -> None:
    found = {(str(path), name) for path in modules().values() for name in names(path) if NOT_NAMES & {*words(name)}}
    assert found == set()


def test_the_package_stays_small_and_typed() -> None:
    texts = {str(path): path.read_text() for path in modules().values()}
    lines = {path: text.count("\n") for path, text in texts.items()}
    assert {path: number for path, number in lines.items() if number > MOST_LINES_OF_A_MODULE} == {}
    assert sum(lines.values()) <= MOST_LINES
    assert sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()) < MOST_ANY
