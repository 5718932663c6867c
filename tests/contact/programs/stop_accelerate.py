"""A loop with Accelerate whose own handler sets a flag on each rank, with workers of its loader."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    place, asked = Path(sys.argv[1]), []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    accelerator = Accelerator(cpu=True)
    plain = nn.Linear(8, 3)
    data = TensorDataset(torch.randn(1 << 16, 8), torch.randint(0, 3, (1 << 16,)))
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(data, batch_size=16, num_workers=2)
    )
    step = 0
    for step, (inputs, targets) in enumerate(loader):
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if step == 5:
            (place / f"ready-{os.environ['RANK']}").write_text(str(os.getpid()))
        if asked:
            accelerator.save_state(str(place / "checkpoints" / str(step)))
            break
    accelerator.wait_for_everyone()
    (place / f"saved-{os.environ['RANK']}").write_text(f"checkpoints/{step}")


if __name__ == "__main__":
    main()
