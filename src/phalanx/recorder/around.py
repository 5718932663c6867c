"""The wrapper of torch's functions that the recorder uses."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, TypeVar

import torch

from phalanx.status import own_page

P = ParamSpec("P")
T = TypeVar("T")


def never_raises(hook: Callable[P, None]) -> Callable[P, None]:
    """Returns a hook whose errors do not reach its caller: training continues unrecorded. The first is printed."""
    has_complained = False

    @functools.wraps(hook)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal has_complained
        try:
            hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is not the script's)
            if not has_complained:
                has_complained = True
                what = f"{type(error).__name__}: {error}"
                print(f"phalanx: what this rank does could not be recorded ({what}); trying again", file=sys.stderr)

    return wrapped


def around(note: Callable[..., AbstractContextManager[None] | None]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Returns a decorator: a function runs in the context that ``note`` returns for this page and its arguments."""

    def wrap(plain: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(plain)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            # A compiler that traces this must find nothing but the function itself.
            page = None if torch.compiler.is_compiling() else own_page.current()
            context = None if page is None else note(page, *args, **kwargs)
            if context is None:
                return plain(*args, **kwargs)
            with context:
                return plain(*args, **kwargs)

        return wrapped

    return wrap
