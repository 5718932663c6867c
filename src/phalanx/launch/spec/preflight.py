"""Checks of a program before it is started, and what it is likely to import."""

from __future__ import annotations

import shutil
from pathlib import Path

from phalanx.errors import UsageError
from phalanx.launch.spec.launch_spec import LaunchSpec

_COMPILES = "DistributedDataParallel", "data_parallel(", "torch.compile"
_SAVES = "Checkpointer(", "distributed.checkpoint"
"""The words in a script that lead to late imports."""


def check(spec: LaunchSpec) -> None:
    """Raises once, before anything starts, what would fail on every rank."""
    program = spec.program
    if program.kind in ("script", "path"):
        _check_readable(program.target)
    if program.kind == "path" and not Path(program.target).is_absolute():
        raise UsageError(f"--run-path needs an absolute path, but got {program.target}.")
    if program.interpreter is not None and shutil.which(program.interpreter) is None:
        raise UsageError(
            f"PYTHON_EXEC={program.interpreter} is not on PATH or not executable; unset it, or correct it."
        )
    if program.kind == "command" and shutil.which(program.target) is None:
        raise UsageError(f"the program {program.target} is not on PATH or not executable.")


def _check_readable(script: str) -> None:
    try:
        Path(script).stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"the script {script} does not exist (looked in {Path.cwd()}).") from None
    except OSError as error:
        raise UsageError(f"the script {script} cannot be read: {error.strerror}.") from None


def script_directory(spec: LaunchSpec) -> str | None:
    """Returns the first entry of the workers' sys.path."""
    if spec.program.kind == "module":
        return str(Path.cwd())
    if spec.program.kind == "script":
        target = Path(spec.program.target).resolve()
        return str(target if target.is_dir() else target.parent)
    return None


def late_imports(spec: LaunchSpec) -> tuple[str, ...]:
    """Returns modules that every rank would import when it wraps or saves a model: better once, before the fork.

    The script's text decides. A wrong guess costs a second or two, and nothing else.
    """
    if spec.nproc_per_node == 1 or spec.program.kind != "script":
        return ()
    try:
        text = Path(spec.program.target).read_text(errors="replace")
    except OSError:
        return ()  # a directory or an archive
    saves = ("torch.distributed.checkpoint",) if any(word in text for word in _SAVES) else ()
    if not any(word in text for word in _COMPILES):
        return saves
    from phalanx.torch_compat import COMPILER  # most short scripts do without

    return COMPILER, *saves
