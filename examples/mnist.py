"""Trains on MNIST's own files, on several processes.

    phalanx run --nproc-per-node 2 examples/mnist.py --data DIRECTORY
    python examples/mnist.py --data DIRECTORY

DIRECTORY holds the four files of MNIST, as they are published, packed (.gz) or not: train-images-idx3-ubyte,
train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte. Fashion-MNIST has the same names.
"""

import argparse
import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="of each rank")
    args = parser.parse_args()
    with px.init(seed=0) as world:
        train_data, test_data = load(args.data, "train"), load(args.data, "t10k")
        fit(world, train_data, test_data, args.epochs, args.batch_size)


def load(directory: Path, part: str) -> TensorDataset:
    images = read_idx(directory, f"{part}-images-idx3-ubyte")
    labels = read_idx(directory, f"{part}-labels-idx1-ubyte")
    return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())


def read_idx(directory: Path, name: str) -> Tensor:
    """Reads an IDX file: two zero bytes, the type (8: bytes), the number of dimensions, their sizes, the bytes."""
    path = next((path for path in (directory / name, directory / f"{name}.gz") if path.exists()), None)
    if path is None:
        raise SystemExit(f"{directory} has neither {name} nor {name}.gz; --data must name the directory of the files.")
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zeros, kind, dimensions = struct.unpack_from(">HBB", data)
    if zeros or kind != 8:
        raise SystemExit(f"{path} is not an IDX file of bytes: it begins with {data[:4].hex()}.")
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return torch.frombuffer(bytearray(data[4 + 4 * dimensions :]), dtype=torch.uint8).reshape(shape)


def fit(world: px.World, train_data: TensorDataset, test_data: TensorDataset, epochs: int, batch: int) -> None:
    model = px.data_parallel(make_model().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(train_data, batch_size=batch, sampler=px.ShardSampler(train_data))
    for epoch in range(epochs):
        model.train()
        for images, labels in px.track(loader, epoch=epoch, device=world.device):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            px.log(loss=loss)
        px.print(f"epoch {epoch}: accuracy {evaluate(model, test_data, world):.2%}")


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def evaluate(model: nn.Module, data: TensorDataset, world: px.World) -> float:
    loader = DataLoader(data, batch_size=256, sampler=px.ShardSampler(data, shuffle=False, uneven="exact"))
    correct = px.Mean()
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            correct.update((model(images.to(world.device)).argmax(1) == labels.to(world.device)).float())
    return correct.compute()


if __name__ == "__main__":
    main()
