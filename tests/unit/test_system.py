"""What the kernel reports: /proc is read in one module, and cores are counted in one."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import source_lines
from phalanx.store.join import Claim
from phalanx.system import cgroups, procfs
from tests.unit.test_surface import SOURCE

READS_PROC = {
    "system/procfs.py",
    "testing/namespaces.py",  # mounts one
}
IMPORTS_PSUTIL = {
    "diagnose/doctor/machine.py",
    "diagnose/doctor/network.py",
    "system/ports.py",
}


def modules_with(word: str) -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCE.rglob("*.py"):
        name, text = path.relative_to(SOURCE).as_posix(), path.read_text()
        if word in text and not name.startswith("bench/"):  # which measures other programs too
            yield name, ast.parse(text)


def texts(tree: ast.Module) -> Iterator[str]:
    """Every string, without docstrings."""
    explained = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in explained and isinstance(node.value, str):
            yield node.value


def test_proc_is_read_in_one_module() -> None:
    found = {name for name, tree in modules_with("/proc") if any(re.match("/proc(/|$)", text) for text in texts(tree))}
    assert found == READS_PROC


def test_one_module_computes_paths_from_its_own() -> None:
    """So a module can be moved, and its frames stay phalanx's."""
    found = {
        name
        for name, tree in modules_with("__file__")
        if any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(tree))
    }
    assert found == {"source_lines.py", "native/library.py"}, "the compiled library lies beside the second"
    assert Path(source_lines.PACKAGE_ROOT) == SOURCE


def test_psutil_is_for_networks_and_other_systems() -> None:
    """Importing it takes longer than all that a rank reads of itself in /proc."""
    assert {name for name, _ in modules_with("import psutil")} == IMPORTS_PSUTIL


def test_a_process_that_has_ended_is_known_by_its_claim() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    own = Claim.of_this_process(0, 2)
    claim = Claim(1, 2, own.host, child, procfs.start_ticks(child), own.machine)
    try:
        assert (own.has_died, claim.has_died) == (False, False)
        assert procfs.descendants(os.getpid()) >= procfs.living([child]) == {child}
        assert Claim(1, 2, own.host, child, claim.born + 1, own.machine).has_died, "another process with its pid"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert claim.has_died, "a zombie"
    assert child not in procfs.descendants(os.getpid()) | procfs.living([child])
    os.waitpid(child, 0)
    assert claim.has_died
    assert not Claim(1, 2, own.host, child, claim.born, "another machine").has_died


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/pod/box", {"pod/cpu.max": "50000 100000", "pod/box/cpu.max": "max 100000"}, 0.5),
        ("0::/pod/box", {"cpu.max": "max 100000", "pod/box/cpu.max": "100000 100000"}, 1.0),
        ("1:cpu,cpuacct:/docker/4711\n0::/", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2.0),
        ("1:cpu:/a/b", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "100000"}, 1.0),
        ("1:cpu:/a/b", {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, None),
    ],
    ids=["v2", "v2 nested", "v2 below", "v1 of a container", "v1 nested", "v1 without a quota"],
)
def test_cores_that_control_groups_allow(
    membership: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    for name, text in {"membership": membership, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    found = cgroups.cores(tmp_path, tmp_path / "membership")
    here = len(os.sched_getaffinity(0))
    assert found == cgroups.Cores(os.cpu_count() or 1, here, quota)
    assert found.usable == (here if quota is None else max(1, min(here, int(quota))))


@contextlib.contextmanager
def group_with_quota() -> Iterator[Path]:
    """A new control group below one that has a quota of one core."""
    for parent in cgroups.binding("cpu", cgroups.ROOT, procfs.OWN_CGROUPS):
        group = parent / f"phalanx-test-{os.getpid()}"
        with contextlib.ExitStack() as cleanup:
            try:
                for made in (group, group / "inner"):
                    made.mkdir()
                    cleanup.callback(made.rmdir)
                is_first_version = (group / "cpu.cfs_quota_us").exists()
                with (group / ("cpu.cfs_quota_us" if is_first_version else "cpu.max")).open("r+") as quota:
                    quota.write("100000")
            except OSError:
                continue
            yield group / "inner"
            return
    pytest.skip("no control group with a quota can be made here")


def test_run_and_doctor_count_the_same_cores(script, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError")  # which the doctor would import for seconds
    with group_with_quota() as group:
        enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"

        def inside(*arguments: str) -> str:
            command = [sys.executable, "-c", f"{enter}; from phalanx import cli; cli.main({list(arguments)})"]
            environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
            return subprocess.run(command, env=environ, capture_output=True, text=True, check=False).stdout

        found = {each["name"]: each["value"] for each in json.loads(inside("doctor", "--json"))}
        planned = inside("run", "--dry-run", "--nproc-per-node", "cpu", script("pass"))
    assert found["cores"] == f"1 usable of {os.cpu_count()}; the container's quota is 1"
    assert "1 node × 1 processes = 1 ranks" in planned
