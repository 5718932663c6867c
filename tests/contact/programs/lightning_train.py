"""PyTorch Lightning's Trainer with DDP: training, validation, metrics over all ranks, a checkpoint."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from outcome import digest, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
        self.losses: list[float] = []
        self.was_inference: list[bool] = []
        self.is_ddp = False

    def on_train_start(self) -> None:
        self.is_ddp = isinstance(self.trainer.strategy.model, DistributedDataParallel)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.was_inference.append(torch.is_inference_mode_enabled())
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(128, 8, generator=generator), torch.randint(0, 3, (128,), generator=generator))
    L.seed_everything(5)
    model = Classifier()
    place = Path(sys.argv[-1])
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint(place, filename="last")],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    loaders = [DataLoader(data, batch_size=16, shuffle=shuffle) for shuffle in (True, False)]
    trainer.fit(model, *loaders)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trainer.validate(model, loaders[1], verbose=False)
    again = {name: value.item() for name, value in trainer.callback_metrics.items()}
    leave(
        is_ddp=model.is_ddp,
        weights=digest(model),
        losses=model.losses,
        metrics=[metrics, again],
        was_inference=model.was_inference,
        saved=(place / "last.ckpt").exists(),
    )


if __name__ == "__main__":
    main()
