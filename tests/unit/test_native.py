"""The C library: built by any compiler, or left out with the compiler's error; an old or foreign one is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.native import library
from tests.conftest import REPOSITORY

LIKE_CLANG = """#!/bin/sh
# Refuses what clang refuses; otherwise it makes empty files.
while [ $# -gt 0 ]; do
    case $1 in
        -fvect-*) echo "cc: error: unknown argument: '$1'" >&2; exit 1 ;;
        -o) touch "$2" ;;
    esac
    shift
done
"""
BROKEN = """#!/bin/sh
echo "csrc/wait.c: In function 'now_ns':" >&2
echo "csrc/wait.c:26:5: error: the sources are from the future" >&2
exit 1
"""


def build(compiler: str, directory: Path) -> tuple[Path, str]:
    """Where setup.py put the library, and what it printed, with a compiler that this script is."""
    program = directory / "cc"
    program.write_text(compiler)
    program.chmod(0o755)
    place = directory / "built"
    options = ["build_ext", "--build-lib", str(place), "--build-temp", str(directory / "objects")]
    environment = {**os.environ, "CC": str(program), "LDSHARED": f"{program} -shared"}
    command = [sys.executable, str(REPOSITORY / "setup.py"), "-q", *options]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
    return place / "phalanx" / "native", done.stdout + done.stderr


def test_options_of_gcc_are_left_out_for_other_compilers(tmp_path: Path) -> None:
    found, _ = build(LIKE_CLANG, tmp_path)
    assert [path.name for path in found.iterdir()] == ["libphalanx_shm.so"]


def test_the_compilers_own_error_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = build(BROKEN, tmp_path)
    assert [path.name for path in found.iterdir()] == ["not_built.txt"]
    assert "In function 'now_ns'" in said
    monkeypatch.setattr(library, "LIBRARY", found / "libphalanx_shm.so")
    monkeypatch.setattr(library, "WHY_NOT", found / "not_built.txt")
    error = "csrc/wait.c:26:5: error: the sources are from the future"
    with pytest.raises(library.NotBuilt) as caught:
        library.library.__wrapped__()
    assert str(caught.value) == f"the shm library is not there: it could not be compiled ({error})"
    assert "In function 'now_ns':\n" + error in library.WHY_NOT.read_text()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("int phx_version(void) { return 1; }", f"the shm library has version 1, not {library.VERSION}: install"),
        ("int something_else(void) { return 1; }", "foreign.so is not the shm library of phalanx: install"),
    ],
    ids=["old", "foreign"],
)
def test_another_library_is_refused_with_the_reason(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "foreign.so")
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library.LIBRARY)]
    subprocess.run(command, input=source, text=True, check=True)
    with pytest.raises(library.NotBuilt) as caught:
        library.library.__wrapped__()
    assert reason in str(caught.value)
