"""Ranks that stand still while their devices run: a device that computes is no hang, one that is stuck is named.

The cases are attempts of one run, as in tests/faults/test_stalls.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.conftest import Outcome

CASES = """
import os, sys, time

case = sys.argv[1:][int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
world = px.init(device="sim:0", backend="simccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).to("sim"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
print("case", case, flush=True)

def train(steps):
    for step in range(steps):
        loss = model(torch.ones(4, 8).to("sim")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()

train(3)
if case == "healthy":
    if world.rank == 1:
        sim.device.launch(lambda: time.sleep(2.0))
    train(2)
    print(f"rank {world.rank} is over", flush=True)
    px.barrier()
    sys.exit(1)
if case == "host" and world.rank == 1:
    time.sleep(1000)
if case == "device" and world.rank == 1:
    sim.device.hold()
train(2)
"""


def test_devices_that_compute_are_stuck_or_wait(on_sim: Callable[..., Outcome]) -> None:
    flags = ("--stall-after", "0.8", "--on-stall", "kill", "--max-restarts", "2")
    run = on_sim(CASES, *flags, arguments=("healthy", "host", "device"))
    # A kernel of 2 s on rank 1 while rank 0 waits for it in its own queue: longer than --stall-after, and no hang.
    healthy, host, device = run.err.split("starting again")
    assert "rank 0 is over" in run.out, run.err
    assert "no rank has made progress" not in healthy
    assert "rank 0 waits in a collective" in host
    assert re.search(r"rank 1 is missing: it sleeps at train.py:\d+: time.sleep\(1000\)", host), host
    # Both hosts wait for their devices, in the same line.
    assert "rank 0 waits in a collective" in device
    assert "rank 1 is missing: it waits for its device, which has not finished its own work" in device
