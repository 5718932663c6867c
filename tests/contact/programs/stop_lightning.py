"""PyTorch Lightning's Trainer, which saves on the exception that it raises after SIGTERM, and workers of its loader."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import lightning as L
import moments
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from outcome import digest, leave
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Loading(L.Callback):
    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        moments.reach("loading", 0.2)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        moments.step(self.global_step)
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        if self.global_step:
            moments.reach("evaluation", 0.03)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        moments.reach("saving", 0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    data = TensorDataset(torch.randn(4096, 8), torch.randint(0, 3, (4096,)))
    kept = OnExceptionCheckpoint(moments.PLACE / "checkpoints")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=100_000,
        val_check_interval=15,
        logger=False,
        callbacks=[Loading(), kept, ModelCheckpoint(moments.PLACE / "every", every_n_train_steps=20)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=moments.PLACE,
    )
    model = Classifier()
    test = TensorDataset(*data[:128])
    try:
        trainer.fit(model, DataLoader(data, batch_size=16, num_workers=2), DataLoader(test, batch_size=16))
    except SIGTERMException:
        leave(step=trainer.global_step, weights=digest(model), checkpoint="checkpoints/on_exception.ckpt")


if __name__ == "__main__":
    main()
