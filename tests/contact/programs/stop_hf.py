"""Hugging Face's Trainer with `enable_jit_checkpoint`, and workers of its loader."""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Ready(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 5:
            Path(sys.argv[1], f"ready-{os.environ['RANK']}").write_text(str(os.getpid()))


def main() -> None:
    place = Path(sys.argv[1])
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    rows = torch.randint(0, 32, (4096, 16))
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(place / "checkpoints"),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        dataloader_num_workers=2,
        max_steps=100_000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        enable_jit_checkpoint=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Ready()])
    trainer.train()
    (place / f"saved-{os.environ['RANK']}").write_text(f"checkpoints/checkpoint-{trainer.state.global_step}")


if __name__ == "__main__":
    main()
