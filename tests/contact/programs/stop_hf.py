"""Hugging Face's Trainer with `enable_jit_checkpoint`, and workers of its loader."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import moments
import torch
from outcome import digest, leave
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Stopped(Trainer):
    """It only says where it is."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        moments.step(self.state.global_step)
        return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        moments.reach("evaluation", 0.03)
        return super().prediction_step(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self.control.should_training_stop:
            step = self.state.global_step
            leave(step=step, weights=digest(self.model), checkpoint=f"checkpoints/checkpoint-{step}")

    def _save_optimizer_and_scheduler(self, *args: Any) -> None:
        moments.reach("saving", 0.1)
        super()._save_optimizer_and_scheduler(*args)


def main() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    rows = torch.randint(0, 32, (4096, 16))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(moments.PLACE / "checkpoints"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        dataloader_num_workers=2,
        max_steps=100_000,
        eval_strategy="steps",
        eval_steps=15,
        save_strategy="steps",
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
        enable_jit_checkpoint=True,
    )
    trainer = Stopped(model=model, args=arguments, train_dataset=data, eval_dataset=data[:64])
    moments.reach("loading", 0.2)
    trainer.train()


if __name__ == "__main__":
    main()
