"""A model in two parts on two devices, in several processes with DDP between them.

    phalanx run --nproc-per-node 2 examples/segmented.py

With GPUs, each process uses two of them, so two processes use four GPUs. Without GPUs both parts are on the CPU, and
everything else is the same.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px

SAMPLES, FEATURES = 2048, 64


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))  # the input of each part is moved to its device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    with px.init(seed=0) as world:
        first, second = two_devices(world)
        model = px.data_parallel(TwoParts(), mode="split", parts={"encoder": first, "decoder": second})
        px.print(f"encoder on {first}, decoder on {second}, {world.size} such processes")
        fit(model, second, args.epochs)


def two_devices(world: px.World) -> tuple[torch.device, torch.device]:
    if world.device.type != "cuda":
        return torch.device("cpu"), torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < 2 * world.local_size:
        raise SystemExit(f"{world.local_size} processes with two GPUs each need {2 * world.local_size}, not {gpus}.")
    return torch.device("cuda", 2 * world.local_rank), torch.device("cuda", 2 * world.local_rank + 1)


def fit(model: nn.Module, last: torch.device, epochs: int) -> None:
    data = make_data()
    loader = DataLoader(data, batch_size=32, sampler=px.ShardSampler(data))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        mean = px.Mean()
        for x, y in px.track(loader, epoch=epoch):
            loss = nn.functional.mse_loss(model(x), y.to(last))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            px.log(loss=loss)
            mean.update(loss, len(x))
        value = mean.compute()  # a collective: every rank must call it
        px.print(f"epoch {epoch}: loss {value:.4f}")


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.square().mean(1, keepdim=True))


if __name__ == "__main__":
    main()
