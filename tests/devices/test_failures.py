"""Failures of ranks on the simulated device: the cause, the victims, and what is said of an asynchronous error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.conftest import Outcome, Runner
from tests.unit.test_devices import fake_nvml

JOIN = 'px.init(device="sim:0", backend="simccl", timeout={})'
WITHOUT_RANK_1 = f"""
import time
from phalanx.status import own_page
with {JOIN.format(1)} as world:
    x = torch.ones(4, device=world.device)
    # torch records the collectives of nccl; those of simccl it does not know.
    own_page.current().group("0", range(world.size), int(world.rank != 1), 0)
    if world.rank == 1:
        time.sleep(60)
    torch.distributed.all_reduce(x)
"""


def report(directory: Path) -> dict[str, object]:
    [found] = directory.glob("runs/2*/report.json")
    return json.loads(found.read_text())


def test_a_sticky_error_of_one_device(on_sim: Callable[..., Outcome], tmp_path: Path) -> None:
    """NVIDIA's driver, which here is a fake, lists the rank on its first GPU."""
    fake_nvml(tmp_path)
    ran = on_sim(
        f"""
        import os, pathlib
        with {JOIN.format(60)} as world:
            x = torch.ones(4, device=world.device)
            if world.rank == 1:
                pathlib.Path("pid").write_text(str(os.getpid()))
                sim.device.fail("an illegal memory access was encountered")
            torch.distributed.all_reduce(x)
            print(x.sum().item())
        """,
        env={"LD_LIBRARY_PATH": str(tmp_path), "FAKE_NVML_PID": str(tmp_path / "pid")},
    )
    assert "phalanx: rank 1 failed: SIM error: an illegal memory access was encountered\n" in ran.err
    assert "errors of a device are noticed late: the line may be another one\n" in ran.err
    assert "\n  its GPU 0, Fake H100: 60.0 of 80.0 GiB" in ran.err
    assert "  rank 0 fell with it" in ran.err
    found = report(tmp_path)
    assert (found["cause"]["rank"], found["victims"]) == (1, [0])  # type: ignore[index]
    assert ran.code in (1, 134), "gloo may abort while the interpreter ends, since a kernel still waits in it"


def test_who_is_missing_when_the_watchdog_of_a_group_aborts(
    on_sim: Callable[..., Outcome], phalanx: Runner, tmp_path: Path
) -> None:
    ran = on_sim(WITHOUT_RANK_1 + "    print(x.sum().item())\n", "--shutdown-timeout", "1")
    assert "phalanx: rank 1 failed: it has not come to all_reduce #1, for which rank 0 waited 1 s\n" in ran.err
    assert "  rank 0 fell with it" in ran.err
    found = report(tmp_path)
    assert (ran.code, found["cause"]["rank"], found["victims"]) == (1, 1, [0])  # type: ignore[index]
    again = phalanx("report").out
    assert "rank 0: a victim, SIGABRT, " in again
    assert ": all_reduce #1 did not end within 1 s on all ranks\n    [rank0]:[E ProcessGroupSIM.cpp:1]" in again


def test_a_failure_is_reported_before_a_slow_abort(on_sim: Callable[..., Outcome]) -> None:
    """The group's watchdog ends the rank while it aborts; the others hear of the exception."""
    slow = "    world.group.abort_takes = 60.0\n    raise ValueError('no such label')\n"
    ran = on_sim(WITHOUT_RANK_1 + slow, "--shutdown-timeout", "1")
    assert "phalanx: rank 0 failed: ValueError: no such label\n" in ran.err
    assert "  rank 1 fell with it" in ran.err
