"""PyTorch Lightning's Trainer, which saves on the exception that it raises after SIGTERM, and workers of its loader."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if self.global_step == 5:
            Path(sys.argv[1], f"ready-{os.environ['RANK']}").write_text(str(os.getpid()))
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    place = Path(sys.argv[1])
    data = TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,)))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=100_000,
        logger=False,
        callbacks=[OnExceptionCheckpoint(place / "checkpoints")],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    try:
        trainer.fit(Classifier(), DataLoader(data, batch_size=16, num_workers=2))
    except SIGTERMException:
        (place / f"saved-{os.environ['RANK']}").write_text("checkpoints/on_exception.ckpt")


if __name__ == "__main__":
    main()
