"""PyTorch-Ignite as its documentation has it: idist.Parallel, auto_model, auto_optim, auto_dataloader, metrics."""

from __future__ import annotations

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from outcome import digest, leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset


def training(local_rank: int) -> None:
    torch.manual_seed(idist.get_rank())  # DDP has to give all ranks the weights of the first
    model = idist.auto_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(128, 8, generator=generator), torch.randint(0, 3, (128,), generator=generator))
    loader = idist.auto_dataloader(data, batch_size=16, shuffle=True)
    trainer = create_supervised_trainer(model, optimizer, nn.CrossEntropyLoss(), device=idist.device())
    metrics = {"accuracy": Accuracy(), "loss": Loss(nn.CrossEntropyLoss())}
    evaluator = create_supervised_evaluator(model, metrics=metrics, device=idist.device())
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))
    trainer.run(loader, max_epochs=2)
    evaluator.run(loader)
    leave(
        is_ddp=isinstance(model, DistributedDataParallel),
        weights=digest(model),
        losses=losses,
        metrics=evaluator.state.metrics,
        backend=idist.backend(),
        sum=idist.all_reduce(float(idist.get_rank() + 1)),
    )


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
