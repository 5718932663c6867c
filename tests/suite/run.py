"""torch's own distributed suite on the backends shm and gloo, side by side: `make suite`.

    python tests/suite/run.py --backend both --tests 'test_ddp_*' 'test_all_reduce_*'

Ends with 1 when a test differs between the two in a way that expected.json does not have, or fails on shm alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).with_name("expected.json")
SAMPLE = Path(__file__).with_name("sample.json")

Results = dict[str, dict[str, Any]]
"""By the test's name: what host.Result has."""


def main() -> None:
    arguments = _parse()
    patterns = json.loads(SAMPLE.read_text()) if arguments.sample else arguments.tests
    backends = ["gloo", "shm"] if arguments.backend == "both" else [arguments.backend]
    found: dict[str, Results] = {}
    for backend in backends:
        found[backend] = {}
        for result in _run(backend, patterns, arguments):
            found[backend][result.pop("test")] = result
        if not found[backend]:
            sys.exit(f"no test of the suite is called {' or '.join(patterns)}.")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"ranks": arguments.ranks, "outcomes": found}, indent=1) + "\n")
    expected: dict[str, str] = json.loads(EXPECTED.read_text())
    sys.exit(_summarise(found, expected, arguments.out))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["shm", "gloo", "both"], default="both")
    # Four: some tests need exactly so many, and with fewer they are skipped.
    parser.add_argument("--ranks", type=int, default=4)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--tests", nargs="+", default=["*"], metavar="PATTERN", help="shell patterns of names")
    which.add_argument("--sample", action="store_true", help="the quick tests in sample.json")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for each test")
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork", help="how the ranks are started")
    parser.add_argument("--pretend-gpus", action="store_true", help="the CPU for tests that ask for GPUs: pretend.py")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/suite.json")
    return parser.parse_args()


def _run(backend: str, patterns: list[str], arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results of one backend, as they come."""
    environment = {
        **os.environ,
        "BACKEND": backend,
        "WORLD_SIZE": str(arguments.ranks),
        "SUITE_START": arguments.start,
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(arguments.timeout)),
        # Several ranks share a core here; and a process with a pool of threads cannot be forked.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if arguments.pretend_gpus:
        environment["SUITE_PRETEND_GPUS"] = "1"
    command = [sys.executable, "-m", "tests.suite.host", "--timeout", str(arguments.timeout), *patterns]
    started = time.monotonic()
    number = 0
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            total = int(host.stdout.readline() or -1)
            for number, line in enumerate(host.stdout, 1):
                result = json.loads(line)
                where = f"{backend} {number}/{total} {time.monotonic() - started:.0f}s"
                print(f"[{where}] {result['test']} {result['outcome']} in {result['seconds']:.1f}s", flush=True)
                yield result
        finally:
            host.terminate()
    if number != total:  # not for a test's sake: each of them has a process of its own
        sys.exit(f"the host of {backend} ended with {host.returncode} after {number} tests.")


def _summarise(found: dict[str, Results], expected: dict[str, str], out: Path) -> int:
    print()
    for backend, results in found.items():
        counts = Counter(result["outcome"] for result in results.values())
        seconds = sum(result["seconds"] for result in results.values())
        figures = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        print(f"{backend}: {figures} of {len(results)} in {seconds:.0f} s")
    print(f"All outcomes: {out}")
    bad = _differences(found, expected)
    return 1 if bad else 0


def _differences(found: dict[str, Results], expected: dict[str, str]) -> int:
    """Prints the tests that end differently, and returns how many of them the table does not have."""
    shm = found.get("shm", {})
    # Without gloo beside it, everything that can pass should.
    gloo = found.get("gloo") or {test: {"outcome": "passed"} for test in shm if shm[test]["outcome"] == "failed"}
    differing = [test for test in shm if test in gloo and shm[test]["outcome"] != gloo[test]["outcome"]]
    for test in differing:
        ours, theirs = shm[test], gloo[test]
        print(f"\n{test}: {theirs['outcome']} on gloo, {ours['outcome']} on shm")
        for each in (ours, theirs):
            if each.get("reason"):
                print(f"  {each['reason']}")
        print(f"  {expected.get(test, 'NOT EXPECTED')}")
    alike = [test for test in shm if test in gloo and test not in differing and shm[test]["outcome"] != "skipped"]
    stale = [test for test in expected if test in alike]
    for test in stale:
        print(f"\n{test}: in {EXPECTED.name}, but ended as on gloo")
    return len([test for test in differing if test not in expected]) + len(stale)


if __name__ == "__main__":
    main()
