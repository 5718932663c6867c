"""Which attempt of a run this is, and at which step it resumes. The progress line shows it."""

from __future__ import annotations

import os

from phalanx import env

_resumed_from: int | None = None


def resume_from(step: int | None) -> None:
    """A checkpoint has been loaded; None when that is history, and whatever is trained next begins anew."""
    global _resumed_from
    _resumed_from = step


def describe() -> str:
    """``attempt 2 from step 70``; nothing for a run that has not been interrupted."""
    count = env.integer(os.environ, "TORCHELASTIC_RESTART_COUNT") or 0
    parts = [f"attempt {count + 1}"] if count else []
    if _resumed_from is not None:
        parts.append(f"from step {_resumed_from}")
    return " ".join(parts)
