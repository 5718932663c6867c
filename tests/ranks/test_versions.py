"""Other versions of torch: what a default run prints there, and which backend it gets.

With the torch of constraints.txt the first test shows little; `make test-torch` runs it with the others.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from phalanx import backends, torch_compat
from phalanx.diagnose.run_directory import read_events
from phalanx.errors import UsageError
from phalanx.events import rank_events_path
from tests.conftest import Runner, by_rank

TRAINING = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    total = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    print(total.tolist(), type(dist.group.WORLD).__name__)
    del model
    dist.destroy_process_group()
"""


# Triton complains at the end about what has not been freed; torch for CPUs comes without it.
TRITON = """
    import os

    class Kept:
        def __init__(self):
            self.own = self

        def __del__(self, write=os.write):
            write(1, b"freed\\n")

    kept = Kept()
"""


def test_a_default_run_prints_what_the_script_prints(phalanx: Runner, script) -> None:
    lines = [f"[3.0, 3.0, 3.0] {'ProcessGroup' if torch_compat.why_no_shm() else 'ShmGroup'}"]
    preload = []
    if find_spec("triton") is None:
        script(TRITON, "triton.py")
        preload, lines = ["--preload", "triton"], [*lines, "freed"]
    outcome = phalanx("run", "--nproc-per-node", "2", *preload, script(TRAINING))
    assert outcome.code == 0, outcome.err
    assert by_rank(outcome) == dict.fromkeys((0, 1), lines)
    assert [line.partition(",")[0] for line in outcome.told] == ["phalanx: 2 ranks"]


def test_an_older_torch_gets_gloo_and_one_line(phalanx: Runner, script, latest: Path) -> None:
    """It is this one, with another number."""
    script("import torch.distributed; torch.__version__ = '2.7.1+cpu'; del torch.distributed.send", "older.py")
    outcome = phalanx("run", "--nproc-per-node", "2", "--preload", "older", script(TRAINING))
    assert outcome.code == 0, outcome.err
    for lines in by_rank(outcome).values():  # torch 2.8 to 2.10 has a line of its own about gloo, as under torchrun
        assert [line for line in lines if "[Gloo]" not in line] == ["[3.0, 3.0, 3.0] ProcessGroup"]
    assert outcome.err.splitlines()[1:] == [
        "phalanx: the backend is gloo: shm needs torch 2.8 or newer, and this is 2.7.1+cpu"
    ]

    for rank in (0, 1):  # a name that it does not have is told where the run's files are, and nowhere else
        events = read_events(rank_events_path(latest, rank))
        assert [(event["event"], event["name"]) for event in events] == [("feature off", "torch.distributed.send")]


def test_a_hang_is_explained(phalanx: Runner, script) -> None:
    """Also where torch has no flight recorder for gloo."""
    hangs = """
        import time, torch, torch.distributed as dist

        dist.init_process_group()
        if dist.get_rank() == 1:
            time.sleep(100)
        dist.all_reduce(torch.ones(1))
    """
    outcome = phalanx("run", "--nproc-per-node", "2", "--stall-after", "1", "--on-stall", "kill", script(hangs))
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("phalanx: a hang: rank 1 sleeps at train.py:6 while rank 0 waits")


def test_shm_by_name_says_which_torch_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    with pytest.raises(UsageError, match=r"'shm' cannot be used: shm needs torch 2\.8 or newer, and this is 2\.7\.1;"):
        backends.require_shm()
    wrapped = backends._recording(lambda *_: pytest.fail("torch does not know it"))
    with pytest.raises(UsageError, match=r"shm needs torch 2\.8"):
        wrapped("shm")


def test_the_factor_of_a_premultiplied_sum() -> None:
    """Where it is no attribute, it stands in the operator's state."""
    for factor in (0.5, torch.tensor([0.5])):
        op = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]  # the stubs lack it
        older = SimpleNamespace(__getstate__=op.__getstate__)
        assert torch_compat.factor_of(op) == torch_compat.factor_of(older) == 0.5
