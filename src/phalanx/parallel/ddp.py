"""torch's DistributedDataParallel with errors that name parameters, and compression of gradients by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import backends
from phalanx.errors import UsageError
from phalanx.failure.missing_gradients import missing_gradients
from phalanx.parallel.alone import save_without_prefix, unwrapped
from phalanx.torch_compat.dynamo import skipped

POWERSGD_RANK = 1
POWERSGD_START = 1000
"""Steps with whole gradients before PowerSGD begins: torch's own default. Compression harms early steps most."""


class Parallel(DistributedDataParallel):
    """torch's DistributedDataParallel. Its state dict has the model's own names, and its errors name parameters."""

    def __init__(self, module: nn.Module, *, compress: str | None = None, **options: Any) -> None:
        # With views a step takes 0.82 (MLP) to 0.94 (transformer) of its time on shm, and 0.82 to 1.01 on gloo
        # (benchmarks/ddp_step.py, on CPUs): no copy out of the buckets, no page faults of a second set of gradients.
        options.setdefault("gradient_as_bucket_view", True)
        super().__init__(module, **options)
        # In DDP's order, and as they are now: DDP does not notice parameters that are frozen later.
        ignored = self.parameters_to_ignore
        named = unwrapped(module).named_parameters()
        self._names = [name for name, each in named if each.requires_grad and name not in ignored]
        save_without_prefix(self)
        if compress is not None:
            _COMPRESSIONS[compress](self)

    # torch.compile skips this function, as it skips DDP's own forward.
    @skipped
    def forward(self, *inputs: object, **kwargs: object) -> object:
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            text = missing_gradients(str(error), self._names, self.find_unused_parameters)
            if text is None:
                raise
            raise UsageError(text) from None


# ---- compression


def _half(dtype: str) -> Callable[[Parallel], None]:
    def register(model: Parallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        hook = getattr(default_hooks, f"{dtype}_compress_hook")

        # torch accepts bf16 for nccl and xccl only, by the hook's name; others can do it too. There are no annotations,
        # because DDP compares them, and in this file they are strings.
        def renamed(group, bucket):
            return hook(group, bucket)

        model.register_comm_hook(model.process_group, renamed)

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
    # Otherwise the zero gradient of an unused parameter becomes NaN. torch's annotation says int.
    setattr(state, "orthogonalization_epsilon", 1e-8)  # noqa: B010
    hook = powerSGD_hook.powerSGD_hook

    # PowerSGD starts its second collective in a callback. gloo runs callbacks in its own thread, at any time: it could
    # meet another rank's next bucket. So each bucket is waited for. There are no annotations, as above.
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
