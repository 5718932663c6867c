"""Builds the C library with whatever C11 compiler is there. Everything else about the package is in pyproject.toml.

The library is no Python extension: ctypes loads it, so one build serves every Python and every torch. Where it cannot
be built the package is installed without it, and phalanx says the reason when it falls back to gloo.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES, HEADERS = (sorted(map(str, Path("csrc").glob(kind))) for kind in ("*.c", "*.h"))
# No contraction: a*b+c rounded once here and twice there would not be the same bits everywhere.
FLAGS = ["-std=c11", "-O2", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
# GCC below -O3 needs to be told that a loop of unknown length is worth vectorising; -O3 takes half as long again and is
# no faster. clang does it by itself and refuses the second option.
GCC_FLAGS = ["-ftree-vectorize", "-fvect-cost-model=dynamic"]
NAME = "phalanx.native.libphalanx_shm"


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        note = target.with_name("not_built.txt")
        note.unlink(missing_ok=True)
        for flags in (FLAGS + GCC_FLAGS, FLAGS):
            ext.extra_compile_args = flags
            error = self._compile(ext)
            if error is None:
                return
        target.unlink(missing_ok=True)
        note.parent.mkdir(parents=True, exist_ok=True)
        reason = next((line for line in error.splitlines() if "error" in line), error.splitlines()[-1])
        note.write_text(f"it could not be compiled ({reason.strip()})\n{error}\n")
        print(f"phalanx: the C library was left out: {error}")

    def _compile(self, ext: Extension) -> str | None:
        """None, or all that the compiler said. It inherits standard error, whichever way setuptools starts it."""
        os.environ["LC_ALL"] = "C"
        own = os.dup(2)
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            os.dup2(said.fileno(), 2)
            try:
                super().build_extension(ext)
                return None
            except Exception as error:  # noqa: BLE001 (no compiler, a broken one: each has its own errors)
                said.seek(0)
                return f"{said.read()}{error}".strip()
            finally:
                os.dup2(own, 2)
                os.close(own)

    def copy_extensions_to_source(self) -> None:
        """For `pip install -e`: what was built, or the reason why it was not."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            built = Path(self.build_lib, self.get_ext_filename(ext.name))
            source = Path("src", self.get_ext_filename(ext.name))
            note, copied = (path.with_name("not_built.txt") for path in (built, source))
            if note.exists():
                source.unlink(missing_ok=True)  # of an earlier build
                self.copy_file(str(note), str(copied))
            else:
                copied.unlink(missing_ok=True)


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension(NAME, SOURCES, depends=HEADERS, language="c", optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel},
)
