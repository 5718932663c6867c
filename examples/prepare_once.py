"""Prepares data once: rank 0 runs first and writes the file, then the others read it.

    phalanx run --nproc-per-node 4 examples/prepare_once.py --data prepared

In a second run the file exists already. If each machine has its own disk, the other machines do not see rank 0's file:
with px.rank_zero_first(local=True) one rank of each machine runs first.
"""

import argparse
import zlib
from pathlib import Path

import torch

import phalanx as px


def prepare(directory: Path, rank: int) -> Path:
    """Returns the file of the dataset, and writes it if it does not exist."""
    path = directory / "dataset.pt"
    if path.exists():
        print(f"rank {rank} finds it prepared")
        return path
    print(f"rank {rank} prepares")
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    unfinished = path.with_suffix(".unfinished")
    torch.save({"inputs": torch.randn(1000, 8, generator=generator)}, unfinished)
    unfinished.rename(path)  # the file is complete or does not exist, even if this process is killed
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="where the dataset is kept")
    args = parser.parse_args()
    with px.init() as world:
        with px.rank_zero_first():
            path = prepare(args.data, world.rank)
        inputs = torch.load(path, weights_only=True)["inputs"]
        checksum = zlib.crc32(inputs.numpy().tobytes())
        print(f"rank {world.rank} has {tuple(inputs.shape)}, checksum {checksum:08x}")


if __name__ == "__main__":
    main()
