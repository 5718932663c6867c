"""Hugging Face's Trainer: accumulation, evaluation, checkpoints, and a second Trainer that resumes from one."""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from outcome import digest, finish, leave
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def new_trainer(place: Path, steps: int) -> Trainer:
    set_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 32, (96, 16), generator=generator)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(place),
        use_cpu=True,
        ddp_backend="gloo",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        logging_steps=1,
        learning_rate=0.01,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:24])


def history(trainer: Trainer) -> list[dict[str, float]]:
    """Without the times."""
    kept = ("loss", "eval_loss", "grad_norm", "learning_rate", "step")
    return [{key: value for key, value in entry.items() if key in kept} for entry in trainer.state.log_history]


def main() -> None:
    place = Path(sys.argv[-1], "checkpoints")
    trainer = new_trainer(place, 8)
    trainer.train()
    whole: Any = trainer.model
    resumed = new_trainer(place, 8)
    resumed.train(resume_from_checkpoint=str(place / "checkpoint-4"))
    again: Any = resumed.model
    leave(
        is_ddp=isinstance(trainer.model_wrapped, DistributedDataParallel),
        weights=digest(whole),
        resumed=digest(again) == digest(whole),
        history=history(trainer),
    )


if __name__ == "__main__":
    main()
    finish()
