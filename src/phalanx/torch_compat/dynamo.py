"""torch.compile: functions that it skips, models that it wraps, and its logs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from phalanx.torch_compat import COMPILER, OLDEST_FOR_SHM
from phalanx.torch_compat.names import Name

EVAL_FRAME = Name(
    "torch._C._dynamo:eval_frame",
    "torch.compile skips shm's Python; torch.compiler.disable would import all of the compiler for it.",
    "torch.compile traces into shm's Python, and breaks its graph there.",
    since=OLDEST_FOR_SHM,
)
FRAME_ACTION = Name(
    "torch._C._dynamo:eval_frame._FrameAction", "The action for such a frame.", EVAL_FRAME.lost, since=OLDEST_FOR_SHM
)
FRAME_STRATEGY = Name(
    "torch._C._dynamo:eval_frame._FrameExecStrategy",
    "The strategy for the frames below it.",
    EVAL_FRAME.lost,
    since=OLDEST_FOR_SHM,
)
PRELOADED = Name(
    COMPILER,
    "Imported once for all ranks of a node, when a script needs it.",
    "Each rank imports it by itself, which takes seconds.",
)
DISABLE = Name(
    "torch:_disable_dynamo",
    "torch.compile skips the forward that px.data_parallel puts around DDP's.",
    "A compiled model has one more break in its graph.",
)
COMPILED = Name(
    "torch._dynamo.eval_frame:OptimizedModule._orig_mod",
    "The model inside of a compiled one: checkpoints have its names.",
    "Checkpoints of compiled models have torch.compile's prefix in their names.",
)
INIT_LOGS = Name(
    "torch._logging._internal:_init_logs",
    "TORCH_LOGS that a script sets before its import of torch is applied in a forked worker.",
    "TORCH_LOGS has an effect in a forked worker only when it is set in the shell.",
)
CALLBACKS = Name(
    "torch._dynamo:callback", "The recorder notes the phase compile.", "A rank that compiles may look like a hang."
)
_F = TypeVar("_F", bound=Callable[..., object])


def when_compiling(start: Callable[..., None], end: Callable[..., None]) -> bool:
    """Has these called when torch.compile begins and ends to compile. False as long as the compiler is not loaded."""
    package = sys.modules.get(COMPILER)
    if package is None or getattr(package.__spec__, "_initializing", False):
        return False
    callbacks = CALLBACKS.needed_of(package)
    for register, call in (("on_compile_start", start), ("on_compile_end", end)):
        getattr(callbacks, register, bool)(call)
    return True


def skip_methods(kind: type) -> None:
    """Makes torch.compile run the methods of a class, and all that they call, as plain Python."""
    plain, action, strategy = EVAL_FRAME.get(), FRAME_ACTION.get(), FRAME_STRATEGY.get()
    if plain is None or action is None or strategy is None:
        return
    try:
        skip = strategy(action.SKIP, action.SKIP)  # the function, and all that it calls
        for member in vars(kind).values():
            if isinstance(member, FunctionType):
                plain.set_code_exec_strategy(member.__code__, skip)
    except (AttributeError, TypeError) as error:  # its signature has changed
        EVAL_FRAME.turn_off(f"{type(error).__name__}: {error}")


def skipped(function: _F) -> _F:
    """Makes torch.compile run this function, but not what it calls, as plain Python."""
    disable = DISABLE.get()
    return function if disable is None else disable(function, recursive=False)


def inside_of_compiled(model: object) -> object:
    """Returns the model that torch.compile was given; None if the model is not compiled."""
    is_compiled = type(model).__name__ == "OptimizedModule"
    return COMPILED.needed_of(model) if is_compiled else COMPILED.of(model)
