"""Builds stress.c with a sanitizer and runs it: ``make stress`` at length, the tests for some seconds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "tests/native/stress.c", *sorted((ROOT / "csrc").glob("*.c"))]
SANITIZERS = {"threads": "thread", "processes": "address,undefined", "kills": "address,undefined"}


def build(sanitizer: str, directory: Path) -> Path:
    """The program with this sanitizer; built once in a directory."""
    program = directory / f"stress-{sanitizer.replace(',', '-')}"
    if not program.exists():
        flags = ["-std=c11", "-g", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread"]
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, *flags, "-o", str(program), *map(str, SOURCES)], check=True)
    return program


def run(kind: str, ranks: int, seconds: float, seed: int, directory: Path) -> str:
    """What the program printed; CalledProcessError with its output when it found a fault."""
    program = build(SANITIZERS[kind], directory)
    command = [str(program), kind, str(ranks), str(seconds), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    if done.returncode:
        raise AssertionError(f"{' '.join(command[1:])} failed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each kind and number of ranks")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for kind in SANITIZERS:
            for ranks in range(2, 10):
                sys.stdout.write(run(kind, ranks, arguments.seconds, arguments.seed, Path(directory)))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
