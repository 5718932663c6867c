"""Trains on handwritten digits on several processes and prints a receipt: every sample seen once, replicas equal.

    phalanx run --nproc-per-node 2 examples/digits.py
    python examples/digits.py

The data are the 1,797 scans of 8 x 8 pixels that come with scikit-learn; nothing is downloaded. --batch-size counts the
samples of all ranks together, and the order does not depend on the number of ranks, so the second command trains the
same model. The first command also trains it in one process at the end and compares the weights.

With --checkpoints the run survives the death of its ranks; --kill kills some on purpose:

    phalanx run --nproc-per-node 4 --max-restarts 2 examples/digits.py --checkpoints DIR --kill 1@70 --kill 3@150
"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import phalanx as px

TRAIN = 1440  # the other 357 are for the test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=48, help="of all ranks together")
    parser.add_argument(
        "--checkpoints", metavar="DIR", help="resume from the latest there; save every 10 steps and at a stop"
    )
    parser.add_argument(
        "--kill",
        metavar="RANK@STEP",
        action="append",
        default=[],
        type=rank_and_step,
        help="kill a rank after a step; the second --kill is for the second attempt, and so on",
    )
    args = parser.parse_args()
    with px.init(seed=0) as world:
        if args.batch_size % world.size:
            raise SystemExit(f"--batch-size {args.batch_size} cannot be divided by {world.size} ranks.")
        train_data, test_data = load_data()
        outcome = fit(world, train_data, test_data, args)
        if outcome is None:  # a scheduler has stopped the run: the next one resumes from the checkpoint
            return
        if world.is_main:
            alone = fit_alone(train_data, args.epochs, args.batch_size) if world.size > 1 else None
            print_receipt(world, outcome, alone, args.epochs)
        px.barrier()


def rank_and_step(text: str) -> tuple[int, int]:
    rank, step = text.split("@")
    return int(rank), int(step)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Returns the data for training and test. Training samples carry their number, for the receipt."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    numbers = torch.arange(TRAIN)
    return TensorDataset(images[train], labels[train], numbers), TensorDataset(images[test], labels[test])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def make_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.OneCycleLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)


class Ledger:
    """Counts how often each sample of each epoch was used, on all ranks together. It is saved with the weights."""

    def __init__(self, epochs: int) -> None:
        self.total = torch.zeros(epochs * TRAIN, dtype=torch.int32)
        self.own = torch.zeros_like(self.total)
        """The counts of this rank since the last `add_up`."""

    def note(self, epoch: int, numbers: Tensor) -> None:
        self.own[numbers.cpu() + epoch * TRAIN] += 1

    def add_up(self, world: px.World) -> None:
        if world.size > 1:
            dist.all_reduce(self.own)
        self.total += self.own
        self.own.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.total.copy_(state["total"])


def fit(world: px.World, train_data: TensorDataset, test_data: TensorDataset, args: argparse.Namespace) -> dict | None:
    model = px.data_parallel(make_model().to(world.device))
    sampler = px.ShardSampler(train_data, seed=1)
    loader = DataLoader(train_data, batch_size=args.batch_size // world.size, sampler=sampler)
    optimizer, schedule = make_optimizer(model, args.epochs * (TRAIN // args.batch_size))
    ledger = Ledger(args.epochs)
    state = px.State(model=model, optimizer=optimizer, scheduler=schedule, sampler=sampler, extra={"ledger": ledger})
    checkpointer = px.Checkpointer(args.checkpoints, every=10) if args.checkpoints else None
    if checkpointer is not None:
        checkpointer.load_latest(state)
    started, first = time.perf_counter(), state.step
    for epoch in range(sampler.epoch, args.epochs):
        for images, labels, numbers in px.track(loader, epoch=epoch, device=world.device):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            px.log(loss=loss)
            ledger.note(epoch, numbers)
            state.step += 1
            if checkpointer is not None and (state.step % 10 == 0 or px.stop.requested):
                ledger.add_up(world)
                checkpointer.save(state)
            if (world.rank, state.step) == kill_in_this_attempt(args.kill):
                os.kill(os.getpid(), signal.SIGKILL)
    if px.stop.requested:
        return None
    ledger.add_up(world)
    return {
        "model": model.module,
        "pace": (state.step - first) * args.batch_size / (time.perf_counter() - started),
        "accuracy": evaluate(model, test_data, world),
        "seen": ledger.total,
        "checksums": gather(checksum(model), world),
    }


def kill_in_this_attempt(kills: list[tuple[int, int]]) -> tuple[int, int] | None:
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return kills[attempt] if attempt < len(kills) else None


def evaluate(model: nn.Module, data: TensorDataset, world: px.World) -> float:
    """Returns the exact accuracy: every test sample is counted once, whatever the number of ranks."""
    loader = DataLoader(data, batch_size=128, sampler=px.ShardSampler(data, shuffle=False, uneven="exact"))
    correct = px.Mean()
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            guesses = model(images.to(world.device)).argmax(1)
            correct.update((guesses == labels.to(world.device)).float())
    return correct.compute()


def fit_alone(data: TensorDataset, epochs: int, batch: int) -> nn.Module:
    """Trains the same model in this process alone; of phalanx it uses only the order of the samples."""
    model = make_model()
    sampler = px.ShardSampler(data, num_replicas=1, rank=0, seed=1)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    optimizer, schedule = make_optimizer(model, epochs * len(loader))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels, _ in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    return model


def gather(value: object, world: px.World) -> list:
    parts: list = [value]
    if world.size > 1:
        parts = [None] * world.size
        dist.all_gather_object(parts, value)
    return parts


def checksum(model: nn.Module) -> str:
    """Returns a checksum of all bits of all parameters."""
    import hashlib

    parts = [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def print_receipt(world: px.World, outcome: dict, alone: nn.Module | None, epochs: int) -> None:
    seen, expected = outcome["seen"], epochs * TRAIN
    twice = int((seen > 1).sum())
    checksums = set(outcome["checksums"])
    print(f"\nreceipt for {world.size} rank{'s' * (world.size > 1)}, backend {world.backend}")
    print(f"  samples    {int((seen > 0).sum())} of {expected} seen ({epochs} epochs of {TRAIN}), {twice} twice")
    print(f"  replicas   {'equal' if len(checksums) == 1 else 'DIFFERENT'}, checksum {', '.join(sorted(checksums))}")
    print(f"  accuracy   {outcome['accuracy']:.2%} of 357 test samples")
    print(f"  pace       {outcome['pace']:.0f} samples/s")
    if alone is not None:
        pairs = zip(outcome["model"].cpu().parameters(), alone.parameters(), strict=True)
        off = max((one - other).abs().max().item() for one, other in pairs)
        print(f"  one process trained the same: its weights are {off:.1e} away at most")


if __name__ == "__main__":
    main()
