"""A script for torch.distributed.launch: it uses only torch, and takes --local_rank.

    python -m phalanx.launch --nproc_per_node=4 examples/launch_style.py
    python -m torch.distributed.launch --nproc_per_node=4 examples/launch_style.py

It does not use phalanx: any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT can start it.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    parser = argparse.ArgumentParser()
    # The launcher of torch 1 passes --local_rank, that of torch 2 --local-rank; torchrun sets only the variable.
    parser.add_argument("--local_rank", "--local-rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(args.local_rank)
    device = torch.device("cuda", args.local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", init_method="env://")
    rank = dist.get_rank()

    # The same data on every rank; the sampler gives each its own part.
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 16, generator=generator)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

    torch.manual_seed(rank)  # different parameters on purpose: DistributedDataParallel makes them rank 0's
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(model, device_ids=[args.local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        seen = torch.zeros(2, dtype=torch.float64, device=device)  # sum of the losses, number of samples
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += torch.tensor([loss.item() * len(x), len(x)], dtype=torch.float64, device=device)
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: mean loss {(seen[0] / seen[1]).item():.4f}", flush=True)

    equal = replicas_equal(model)
    if rank == 0:
        print(f"replicas equal: {equal}", flush=True)
    # Delete the DDP model before the group: deleted last, it would join the group's threads while it holds the GIL, and
    # one of these threads may be waiting for the GIL.
    del model
    dist.destroy_process_group()
    if not equal:
        raise SystemExit(f"rank {rank} has other parameters than some other rank")


def replicas_equal(model: nn.Module) -> bool:
    """Returns, on every rank, whether all ranks hold the same parameters to the last bit."""
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    return all(torch.equal(mine, other) for other in everybody)


if __name__ == "__main__":
    main()
