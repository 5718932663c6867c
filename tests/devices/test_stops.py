"""A stop on an accelerator: at the agreed step no collective is left in the device's queue, so a save does not hang."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.conftest import REPOSITORY, start
from tests.devices.conftest import IMPORTS

SCRIPT = """
import os, signal, time
world = px.init(device="sim:0", backend="simccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1).to("sim"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
sim.device.delay = 0.002 * world.rank  # the hosts run ahead, by more or less
step, saved = 0, []

def save(number, frame):
    open(f"began-{number}-{world.rank}", "w").close()
    sim.device.synchronize()
    weights = [parameter.detach().cpu().tolist() for parameter in model.parameters()]
    with open(f"saved-{number}-{world.rank}", "w") as file:
        file.write(f"{step} {weights}")
    saved.append(number)

for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, save)
while True:
    step += 1
    if saved and world.rank == 1:  # it is missing in the next collective
        open("missing", "w").close()
        time.sleep(600)
    loss = model(torch.ones(4, 8).to("sim")).sum()
    loss.backward()
    if saved:
        print(loss.item(), [parameter.grad.cpu() for parameter in model.parameters()])
    optimizer.step()
    optimizer.zero_grad()
    open(f"ready-{world.rank}", "w").close()
"""


def test_a_save_at_the_agreed_step_and_one_behind_a_collective(tmp_path: Path) -> None:
    """The second is given up at the deadline, and that is said; an abort would let it save what is half reduced."""
    (tmp_path / "train.py").write_text(IMPORTS + SCRIPT)
    flags = ("--nproc-per-node", "2", "--shutdown-timeout", "2")
    env = {"PYTHONPATH": str(REPOSITORY), "INVOCATION_ID": ""}
    process = start("-m", "phalanx", "run", *flags, "train.py", cwd=tmp_path, env=env)

    def stop(number: int, *ready: str) -> None:
        limit = time.monotonic() + 60
        while not all((tmp_path / name).exists() for name in ready):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit, os.listdir(tmp_path)
            time.sleep(0.02)
        os.kill(process.pid, number)

    usr1, term = int(signal.SIGUSR1), int(signal.SIGTERM)
    stop(usr1, "ready-0", "ready-1")
    stop(term, f"saved-{usr1}-0", f"saved-{usr1}-1", "missing")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    texts = [(tmp_path / f"saved-{usr1}-{rank}").read_text() for rank in range(2)]
    assert texts[0] == texts[1]
    assert (tmp_path / f"began-{term}-0").exists(), err
    assert not (tmp_path / f"saved-{term}-0").exists()
    assert "the ranks have not agreed on a step within 1 s; the signal is delivered at once" in err
    assert "killed; what was being saved may be incomplete" in err
