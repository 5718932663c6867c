"""Lightning Fabric: setup, backward, accumulation without synchronisation, all_reduce, all_gather, save and load."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from outcome import digest, finish, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(7 + fabric.global_rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(128, 8, generator=generator), torch.randint(0, 3, (128,), generator=generator))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=8))
    losses = []
    for number, (inputs, labels) in enumerate(loader):
        is_accumulating = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    rank = torch.tensor(float(fabric.global_rank + 1))
    path = Path(sys.argv[-1], "checkpoint.pt")
    fabric.save(path, {"model": model})
    before = digest(model)
    fabric.load(path, {"model": model})
    leave(
        is_ddp=isinstance(model._forward_module, DistributedDataParallel),
        weights=digest(model),
        restored=before == digest(model),
        losses=losses,
        mean=fabric.all_reduce(rank.clone(), reduce_op="mean").item(),
        avg=fabric.all_reduce(rank.clone(), reduce_op="avg").item(),
        sum=fabric.all_reduce(rank.clone(), reduce_op="sum").item(),
        gathered=fabric.all_gather(rank).tolist(),
        broadcast=fabric.broadcast({"from": fabric.global_rank}),
    )


if __name__ == "__main__":
    main()
    finish()
