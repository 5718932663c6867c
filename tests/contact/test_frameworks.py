"""Frameworks on two ranks under torchrun and under `phalanx run`: the same numbers on every rank."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.contact.conftest import Beside

PROGRAMS = Path(__file__).parent / "programs"
_TRAINERS = [("fabric_train", "lightning"), ("lightning_train", "lightning"), ("hf_trainer", "transformers")]


@pytest.mark.parametrize(("program", "package"), _TRAINERS)
def test_trainers(program: str, package: str, beside_torchrun: Beside, record_property) -> None:
    path = PROGRAMS / f"{program}.py"
    record_property("what", path.read_text().split('"""')[1].rstrip("."))
    record_property("version", f"{package} {metadata.version(package)}")
    first, second = beside_torchrun(str(path))
    assert first["is_ddp"]
    assert first["weights"] == second["weights"]
    assert first.get("restored", first.get("resumed", True)), "a checkpoint did not bring back what was saved"


@pytest.mark.parametrize("script", ["test_script", "test_ops", "test_sync", "test_merge_weights"])
def test_accelerate(script: str, beside_torchrun: Beside, record_property) -> None:
    """Accelerate's own test scripts.

    Not test_distributed_data_loop, which hangs on CPUs, nor test_ddp_comm_hook, which needs GPUs: under torchrun too.
    """
    record_property("version", f"accelerate {metadata.version('accelerate')}")
    beside_torchrun("-m", f"accelerate.test_utils.scripts.{script}", printed=True)
