"""Makes a forked worker look, to its script, like a fresh interpreter.

The zygote has imported torch; a fresh interpreter has not. So the child hides what the zygote imported and reveals
each package, already loaded, when the script imports it. A package reads its environment variables when it is imported,
so settings that the script made before are applied then.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from phalanx.system import cgroups, procfs
from phalanx.torch_compat.dynamo import INIT_LOGS
from phalanx.torch_compat.tensors import SET_ALLOCATOR

_OPENBLAS_SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")

# Libraries read these once, when they are loaded. A script that sets one before its `import torch` needs an
# interpreter of its own.
_ONLY_AT_LOAD = (
    *("MKL_", "KMP_", "ATEN_", "GOMP_", "OMP_", "MALLOC_", "LD_PRELOAD", "TORCH_CPP_LOG_LEVEL"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "PYTORCH_JIT"),
)
_APPLIED = ("OMP_NUM_THREADS",)
_ALLOCATOR = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the last is the strongest
_SET_BY_LIBRARIES = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")
"""Importing sklearn sets these; no script depends on their effect on torch."""


@dataclass
class FreshModules:
    """The state of a fresh interpreter, recorded before the zygote imports anything."""

    path: list[str]
    modules: frozenset[str]
    """Those that were loaded before any of ours."""
    environment: dict[str, str]
    roots: frozenset[str] = frozenset()
    """The top-level names of everything imported since, with the standard library's."""
    hidden: dict[str, dict[str, ModuleType]] = field(default_factory=dict)

    @contextlib.contextmanager
    def visible(self, directory: str | None) -> Iterator[None]:
        """Puts the script's directory on sys.path, for --preload: the user's own modules are there."""
        if directory is not None:
            sys.path.insert(0, directory)
        try:
            yield
        finally:
            if directory is not None:
                sys.path.remove(directory)

    def note_imports(self) -> None:
        new = {name.partition(".")[0] for name in sys.modules if name not in self.modules}
        # multiprocessing enters the main module under a second name, which is no package.
        self.roots = frozenset(new - {"phalanx", "__mp_main__"})

    def shadowed_by(self, directory: str | None) -> str | None:
        """Why a fresh interpreter would import a module beside the script instead of one that is loaded here."""
        if directory is None:
            return None
        try:
            entries = os.listdir(directory)  # noqa: PTH208
        except OSError:
            return None
        for entry in entries:
            name, _, extension = entry.partition(".")
            importable = extension == "py" or (not extension and Path(directory, entry, "__init__.py").exists())
            if importable and name in self.roots and not _comes_from(sys.modules.get(name), directory):
                return f"{Path(directory, entry)} has the name of a module that is loaded already"
        return None

    def restore(self) -> None:
        """In the child: hides what was imported, and draws new random states."""
        torch = sys.modules["torch"]
        torch.default_generator.seed()
        random = sys.modules.get("numpy.random")
        if random is not None:
            random.seed()
        import multiprocessing

        multiprocessing.current_process().authkey = os.urandom(32)
        for name in list(sys.modules):
            root = name.partition(".")[0]
            if root in self.roots and root not in sys.stdlib_module_names and name not in self.modules:
                self.hidden.setdefault(root, {})[name] = sys.modules.pop(name)
        sys.path[:] = self.path
        importlib.invalidate_caches()
        sys.meta_path.insert(0, _Revealer(self))
        if "triton" in self.hidden:
            atexit.register(self._free_hidden)

    def _free_hidden(self) -> None:
        """Lets the interpreter free hidden modules: Triton prints whatever of its own is not freed at the end."""
        for modules in self.hidden.values():
            sys.modules.update(modules)
        self.hidden.clear()
        gc.unfreeze()

    def apply_settings(self, root: str) -> None:
        """Applies what a package would have read from the environment at its import."""
        if root == "numpy":
            _set_openblas_threads(_openblas_threads(os.environ))
        if root != "torch":
            return
        import torch

        changed = {
            name for name in {*self.environment, *os.environ} if self.environment.get(name) != os.environ.get(name)
        }
        if "OMP_NUM_THREADS" in changed and os.environ.get("OMP_NUM_THREADS", "").isdigit():
            # torch takes at most as many as there are cores at its start.
            torch.set_num_threads(min(int(os.environ["OMP_NUM_THREADS"]), os.cpu_count() or 1))
        if "TORCH_DISTRIBUTED_DEBUG" in changed:
            torch.distributed.set_debug_level_from_env()
        if {"TORCH_LOGS", "TORCH_LOGS_FORMAT", "TORCH_LOGS_OUT"} & changed:
            init = INIT_LOGS.get()
            if init is not None:
                init()
        silent = (*_APPLIED, *_SET_BY_LIBRARIES)
        late = sorted(name for name in changed if name.startswith(_ONLY_AT_LOAD) and name not in silent)
        late += [f"backend: of {name}" for name in _ALLOCATOR if name in changed and _set_allocator(name)]
        if late:
            print(
                f"phalanx: the script set {', '.join(late)} after torch was loaded, so it has no effect; "
                "set it in the shell, or start with --start-method exec.",
                file=sys.stderr,
            )


def _comes_from(module: ModuleType | None, directory: str) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(directory).resolve() in Path(file).resolve().parents


class _Revealer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds hidden packages; loading one puts it back into sys.modules with all of its submodules."""

    def __init__(self, fresh_modules: FreshModules) -> None:
        self._fresh_modules = fresh_modules
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._fresh_modules.hidden:
            return None
        real = self._fresh_modules.hidden[fullname][fullname].__spec__
        if real is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=real.origin)
        spec.submodule_search_locations = real.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = self._fresh_modules.hidden[spec.name][spec.name]
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        root = module.__name__
        module.__spec__ = self._specs.pop(root)
        sys.modules.update(self._fresh_modules.hidden.pop(root))
        if not self._fresh_modules.hidden and self in sys.meta_path:
            sys.meta_path.remove(self)
        self._fresh_modules.apply_settings(root)


def _set_allocator(name: str) -> bool:
    """Applies one of `_ALLOCATOR`; returns whether it has a backend, which torch only accepts while it is loaded."""
    parts = os.environ.get(name, "").split(",")
    rest = ",".join(part for part in parts if not part.strip().startswith("backend:"))
    if has_backend := rest != ",".join(parts):
        os.environ[name] = rest
    apply = SET_ALLOCATOR.get()
    if apply is not None and rest:
        apply(rest)
    return has_backend


def _openblas_threads(environ: Mapping[str, str]) -> int:
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        if environ.get(name, "").isdigit() and int(environ[name]) > 0:
            return int(environ[name])
    return cgroups.usable_cores()


def _set_openblas_threads(count: int) -> None:
    """Sets the threads of numpy's OpenBLAS, which was loaded with one: a thread pool does not survive a fork."""
    for library in {file for file in procfs.mapped_files() if "openblas" in file}:
        try:
            loaded = ctypes.CDLL(library)
        except OSError:  # replaced on disk since it was loaded
            continue
        for setter in _OPENBLAS_SETTERS:
            if hasattr(loaded, setter):
                getattr(loaded, setter)(count)
                break
