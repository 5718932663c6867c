"""The pace of ranks by their devices' clocks: the host runs ahead, so its own clock shows none of this."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Outcome

TRAIN = """
import json, os, subprocess, sys, time
from pathlib import Path

directory = Path(os.environ["PHALANX_RUN_DIR"])
world = px.init(device="sim:0", backend="simccl")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).to("sim"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
batch, work = torch.ones(4, 8), 0.01

def events(kind):
    lines = (directory / "agent.events.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == kind]

def step():
    sim.device.launch(lambda: time.sleep(work))
    model(batch.to("sim")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def is_enough(number):
    enough = torch.tensor(float(world.rank == 0 and bool(events("straggler"))), device="sim")
    torch.distributed.broadcast(enough, 0)
    return number == 400 or bool(enough.item())
"""


def train(on_sim: Callable[..., Outcome], directory: Path, text: str) -> dict[str, Any]:
    run = on_sim(TRAIN + text)
    assert run.code == 0, run.err
    return json.loads((directory / "found.json").read_text())


SLOW = """
if world.rank == 1:
    work = 0.03
for number in range(1, 401):
    step()
    if number % 20 == 0 and is_enough(number):
        break
for number in range(1, 2001):
    step()
    if number == 10 and world.rank == 0:
        command = [sys.executable, "-m", "phalanx", "inspect", "--json", str(directory)]
        asked = subprocess.Popen(command, stdout=subprocess.PIPE)
    if number % 20 == 0:
        over = torch.tensor(float(world.rank == 0 and asked.poll() is not None), device="sim")
        torch.distributed.broadcast(over, 0)
        if over.item():
            break
if world.rank == 0:
    found = {"view": json.loads(asked.stdout.read()), "events": events("straggler")}
    Path("found.json").write_text(json.dumps(found))
"""


def test_a_slow_device_is_named_by_its_own_clock(on_sim: Callable[..., Outcome], tmp_path: Path) -> None:
    """By the host's clock all ranks are as fast: the one with the fast device waits on its device."""
    found = train(on_sim, tmp_path, SLOW)
    [straggler, *_] = found["events"]
    assert (straggler["rank"], straggler["phases"]) == (1, ["device work"])
    view = found["view"]
    assert view["conclusion"].startswith("slowest: rank 1, by ")
    assert view["conclusion"].endswith("in device work")
    fast, slow = view["ranks"]
    assert fast["wait"] > slow["wait"]
    assert slow["compute"] > fast["compute"]
