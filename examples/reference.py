"""The reference experiment: 4,096 random samples, one dense layer, batches of 32 on each rank.

On 4 ranks an epoch has 32 steps on each: 32 × 32 × 4 = 4096. It can be started in three ways:

    phalanx run --nproc-per-node 4 examples/reference.py
    python -m phalanx.launch --nproc_per_node=4 examples/reference.py
    python examples/reference.py --spawn 4

`python examples/reference.py` runs it alone, as a world of one with 128 steps.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px

SAMPLES, FEATURES = 4096, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_epochs", "--max-epochs", type=int, default=2)
    parser.add_argument("--batch_size", "--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--spawn", type=int, metavar="N", help="start N processes from here, without a launcher")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help="given by phalanx.launch; px.init() finds it itself"
    )
    args = parser.parse_args()
    if args.spawn:
        px.spawn(spawned, args=(args.max_epochs, args.batch_size), nprocs=args.spawn)
    else:
        train(args.max_epochs, args.batch_size)


def spawned(rank: int, epochs: int, batch_size: int) -> None:
    """Runs on every rank of px.spawn. px.init() finds the rank in the environment."""
    train(epochs, batch_size)


def train(epochs: int, batch_size: int) -> None:
    with px.init(seed=0) as world:
        fit(world, epochs, batch_size)  # in a function, so that the model is deleted before the group


def fit(world: px.World, epochs: int, batch_size: int) -> None:
    dataset = make_data()
    loader = DataLoader(dataset, batch_size=batch_size, sampler=px.ShardSampler(dataset))
    model = px.data_parallel(nn.Linear(FEATURES, 1).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    who = f"GPU:{world.device.index}" if world.device.type == "cuda" else f"Rank {world.rank}"
    for epoch in range(epochs):
        # One write with the end of the line: spawned ranks share one output, and no launcher separates their lines.
        print(f"{who} | Epoch {epoch} | Batchsize {batch_size} | Steps {len(loader)}\n", end="", flush=True)
        mean = px.Mean()
        for x, y in px.track(loader, epoch=epoch, device=world.device, quiet=True):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean.update(loss, len(x))
        value = mean.compute()  # a collective: every rank must call it
        px.print(f"loss {value:.4f}")


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    weights = torch.randn(FEATURES, 1, generator=generator)
    noise = torch.randn(SAMPLES, 1, generator=generator)
    return TensorDataset(inputs, inputs @ weights + 0.1 * noise)


if __name__ == "__main__":
    main()
