"""PyTorch-Ignite, which wraps a model in DDP only where the backend has a name that it knows."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.contact.conftest import Beside

PROGRAM = Path(__file__).parent / "programs/ignite_train.py"


@pytest.mark.long
def test_ignite(beside_torchrun: Beside, record_property) -> None:
    """PyTorch-Ignite: auto_model, auto_optim, auto_dataloader, metrics."""
    record_property("version", "pytorch-ignite " + metadata.version("pytorch-ignite"))
    first, second = beside_torchrun(str(PROGRAM))
    assert first["is_ddp"]
    assert (first["backend"], first["sum"]) == ("gloo", 3.0)
    assert first["weights"] == second["weights"]
