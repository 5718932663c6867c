"""Training on an accelerator, with two ranks as `phalanx run` starts them, against one process: on the device "sim"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.conftest import Outcome, by_rank

SCRIPT = Path(__file__).with_name("training_script.py")


def test_training_on_an_accelerator(on_sim: Callable[..., Outcome]) -> None:
    """The script asserts; here is what the user sees of it."""
    outcome = on_sim(SCRIPT, timeout=150)
    assert outcome.code == 0, outcome.err
    names = [line for line in by_rank(outcome)[1] if line.startswith("passed: ")]
    assert len(names) == 9, names
    hint = "copied from memory that is not pinned"
    assert sum(hint in line for line in outcome.told) == 1, outcome.told


def test_out_of_memory_on_one_rank(on_sim: Callable[..., Outcome]) -> None:
    outcome = on_sim(
        """
        with px.init(device="sim", backend="simccl") as world:
            model = px.data_parallel(torch.nn.Linear(256, 256).to(world.device))
            sim.device.memory = 4_000_000
            for step in range(100):
                batch = 5000 if world.rank == 1 and step == 3 else 16
                model(torch.ones(batch, 256, device=world.device)).sum().backward()
                torch.sim.synchronize()
        """
    )
    assert outcome.code != 0
    head, *rest = outcome.complaint
    assert "rank 1 failed: torch.OutOfMemoryError: SIM out of memory. Tried to allocate 5120000 bytes; " in head, (
        outcome.err
    )
    assert "bytes are free" in head
    assert any("rank 0" in line for line in rest), outcome.err
