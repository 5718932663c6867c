"""A loop with Accelerate whose own handler sets a flag on each rank, with workers of its loader."""

# pyright: reportMissingImports=false

from __future__ import annotations

import signal

import moments
import torch
from accelerate import Accelerator
from outcome import digest, leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    accelerator = Accelerator(cpu=True)
    plain = nn.Linear(8, 3)
    data = TensorDataset(torch.randn(1 << 16, 8), torch.randint(0, 3, (1 << 16,)))
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(data, batch_size=16, num_workers=2)
    )
    moments.reach("loading", 0.2)
    for step, (inputs, targets) in enumerate(loader):
        moments.step(step)
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if asked or step % 20 == 19:
            name = f"checkpoints/{step}"
            accelerator.save_state(str(moments.PLACE / name))
            if asked:
                accelerator.wait_for_everyone()
                leave(step=step, weights=digest(plain), checkpoint=name)
                break
            moments.reach("saving", 0.1)
            accelerator.wait_for_everyone()
        if step % 15 == 14:
            for _ in range(4):
                moments.reach("evaluation", 0.03)
                accelerator.gather(model(inputs))


if __name__ == "__main__":
    main()
