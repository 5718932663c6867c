"""The reference experiment: 4,096 random samples, one dense layer, batches of 32 on each rank.

On 4 ranks an epoch is 32 steps for each: 32 × 32 × 4 = 4096. It can be started in three ways:

    phalanx run --nproc-per-node 4 examples/reference.py
    python -m phalanx.launch --nproc_per_node=4 examples/reference.py
    python examples/reference.py --spawn 4

and as `python examples/reference.py`, which is a world of one, with 128 steps.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import phalanx as px

SAMPLES, FEATURES, BATCH = 4096, 32, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--spawn", type=int, metavar="N", help="start N processes from here, without a launcher")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="given by phalanx.launch; px.init() knows it")
    args = parser.parse_args()
    if args.spawn:
        px.spawn(spawned, args=(args.epochs,), nprocs=args.spawn)
    else:
        train(args.epochs)


def spawned(rank: int, epochs: int) -> None:
    """What px.spawn calls on every rank. The rank is in the environment too, where px.init() finds it."""
    train(epochs)


def train(epochs: int) -> None:
    with px.init(seed=0) as world:
        fit(world, epochs)  # in a function of its own, so that the wrapped model goes before the group does


def fit(world: px.World, epochs: int) -> None:
    dataset = make_data()
    sampler = DistributedSampler(dataset, num_replicas=world.size, rank=world.rank)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    card = [world.device.index] if world.device.type == "cuda" else None
    model = DistributedDataParallel(nn.Linear(FEATURES, 1).to(world.device), device_ids=card)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)  # a new order, the same on all ranks
        steps, samples, loss = run_epoch(model, optimizer, loader, world)
        # Equal when everything divides evenly; otherwise the last batch is short, and some samples come twice.
        sign = "=" if steps * BATCH * world.size == samples else "≈"
        count = f"{steps} steps × batch {BATCH} × {world.size} ranks {sign} {samples} samples"
        # The end of the line is written with it: spawned ranks share one output, and no launcher sorts their lines.
        print(f"epoch {epoch} rank {world.rank}: {count}, loss {loss:.4f}\n", end="", flush=True)


def make_data() -> TensorDataset:
    """The same on every rank, whatever the rank's own seed is."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    noise = torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(inputs, inputs @ weights + 0.1 * noise)


def run_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, world: px.World
) -> tuple[int, int, float]:
    """Steps of this rank, and over all ranks the number of samples seen and their mean loss."""
    steps = 0
    seen = torch.zeros(2, dtype=torch.float64, device=world.device)  # number of samples, sum of their losses
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x.to(world.device)), y.to(world.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        seen[0] += len(x)
        seen[1] += loss.detach() * len(x)
    dist.all_reduce(seen)
    samples, total = seen.tolist()
    return steps, int(samples), total / samples


if __name__ == "__main__":
    main()
