"""Builds stress.c with a sanitizer, or for aarch64, and runs it: ``make stress`` at length, the tests for some seconds.

An emulator on x86 shows that the library can be built for aarch64 and works there, not that its memory order is right:
that is shown by ThreadSanitizer, and where it is blind by the arguments in csrc/phalanx_shm.h and csrc/record.h.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "tests/native/stress.c", *sorted((ROOT / "csrc").glob("*.c"))]
SANITIZERS = {"threads": "thread", "processes": "address,undefined", "kills": "address,undefined"}


AARCH64 = "aarch64"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"


def why_no_aarch64() -> str | None:
    """What is missing to build and run the program for aarch64; None when nothing."""
    missing = [program for program in (CROSS_COMPILER, EMULATOR) if shutil.which(program) is None]
    if not Path("/usr/aarch64-linux-gnu/lib/libc.a").exists():
        missing.append("libc6-dev-arm64-cross")
    return f"needs {', '.join(missing)}" if missing else None


def build(variant: str, directory: Path) -> Path:
    """The program with this sanitizer, or for AARCH64; built once in a directory."""
    program = directory / f"stress-{variant.replace(',', '-')}"
    if not program.exists():
        own = ["-static"] if variant == AARCH64 else ["-g", f"-fsanitize={variant}", "-fno-sanitize-recover=all"]
        compiler = CROSS_COMPILER if variant == AARCH64 else os.environ.get("CC", "cc")
        flags = ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", *own]
        subprocess.run([compiler, *flags, "-o", str(program), *map(str, SOURCES)], check=True)
    return program


def run(kind: str, ranks: int, seconds: float, seed: int, directory: Path, variant: str | None = None) -> str:
    """What the program printed; AssertionError with its output when it found a fault."""
    variant = variant or SANITIZERS[kind]
    command = [EMULATOR] if variant == AARCH64 else []
    command += [str(build(variant, directory)), kind, str(ranks), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind and number of ranks")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        programs = [(kind, ranks, None) for kind in SANITIZERS for ranks in range(2, 10)]
        if (reason := why_no_aarch64()) is None:
            programs += [(kind, ranks, AARCH64) for kind in SANITIZERS for ranks in (3, 7)]
        for kind, ranks, variant in programs:
            sys.stdout.write(run(kind, ranks, arguments.seconds, arguments.seed, Path(directory), variant))
            sys.stdout.flush()
        if reason is not None:
            print(f"not run on aarch64: {reason}")


if __name__ == "__main__":
    main()
