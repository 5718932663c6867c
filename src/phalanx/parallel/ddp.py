"""DistributedDataParallel as it should come: errors that name parameters, and gradients compressed by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import backends
from phalanx.errors import UsageError
from phalanx.failure.missing_gradients import missing_gradients
from phalanx.parallel.alone import unwrapped
from phalanx.parallel.names import save_without_prefix
from phalanx.torch_compat.dynamo import passed_over

POWERSGD_RANK = 1
POWERSGD_START = 1000
"""Steps with whole gradients before PowerSGD begins: torch's own default. Early steps suffer most from compression."""


class Parallel(DistributedDataParallel):
    """torch's DistributedDataParallel. Its state dict has the model's own names, and its errors name parameters."""

    def __init__(self, module: nn.Module, *, compress: str | None = None, **options: Any) -> None:
        # Measured on CPUs with benchmarks/ddp_step.py: a step takes 0.82 (MLP) to 0.94 (transformer) of
        # its time without views on shm, and 0.82 to 1.01 on gloo. Views save the copy out of the buckets, and the page
        # faults of a second set of gradients.
        options.setdefault("gradient_as_bucket_view", True)
        super().__init__(module, **options)
        # In the order in which DDP numbers them, and as they are now: it does not notice what is frozen later.
        ignored = self.parameters_to_ignore
        named = unwrapped(module).named_parameters()
        self._names = [name for name, each in named if each.requires_grad and name not in ignored]
        save_without_prefix(self)
        if compress is not None:
            _COMPRESSIONS[compress](self)

    # torch.compile passes over this function, as it does over the one of torch that it calls.
    @passed_over
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            told = missing_gradients(str(error), self._names, self.find_unused_parameters)
            if told is None:
                raise
            raise UsageError(told) from None


# ---- compression


def _half(dtype: str) -> Callable[[Parallel], None]:
    def register(model: Parallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{dtype}_compress_hook")

        # torch lets bf16 through for nccl alone, by the hook's name; gloo and shm can do it as well. No annotations,
        # for DDP compares them, and in this file they are strings.
        def by_another_name(group, bucket):
            return hook(group, bucket)

        model.register_comm_hook(model.process_group, hook if model.device_type != "cpu" else by_another_name)

    return register


def _powersgd(model: Parallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        model.process_group,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=POWERSGD_START,
        use_error_feedback=True,
        warm_start=True,
    )
    # A gradient of zeros, of a parameter that was not used, would become NaN. torch's annotation says int.
    setattr(state, "orthogonalization_epsilon", 1e-8)  # noqa: B010
    hook = powerSGD_hook.powerSGD_hook

    # PowerSGD sends its second half from a callback. gloo runs callbacks in a thread of its own, at any time: one
    # rank's second half would meet another's next bucket. So each bucket is waited for; no annotations, as above.
    def in_order(state, bucket):
        future = hook(state, bucket)
        future.wait()
        return future

    keeps_order = model.device_type != "cpu" or backends.is_shm(model.process_group)
    model.register_comm_hook(state, hook if keeps_order else in_order)


_COMPRESSIONS: dict[str, Callable[[Parallel], None]] = {
    "bf16": _half("bf16"),
    "fp16": _half("fp16"),
    "powersgd": _powersgd,
}


def check_compression(name: str | None) -> None:
    if name is not None and (not isinstance(name, str) or name not in _COMPRESSIONS):
        raise UsageError(f"compress={name!r} is unknown; there are {', '.join(map(repr, _COMPRESSIONS))}, and None.")
