"""A script that hangs on one rank, to show what phalanx reports about it.

phalanx run --nproc-per-node 4 --stall-after 3 --on-stall kill examples/stuck.py
"""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import phalanx as px


class Samples(Dataset):
    """Samples, one of which takes forever to load."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 41:
            time.sleep(1000)
        return torch.full((8,), float(index))


with px.init(seed=0) as world:
    samples = Samples()
    model = px.data_parallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(samples, batch_size=4, sampler=px.ShardSampler(samples, shuffle=False), num_workers=1)
    for x in px.track(loader, epoch=0):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()  # the other ranks wait here for the one that has no batch
        optimizer.step()
