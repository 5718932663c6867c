"""The weights of a checkpoint as one safetensors file, for other tools."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoint.catalog import Entry
from phalanx.checkpoint.load import open_content
from phalanx.checkpoint.storage.base import Storage
from phalanx.checkpoint.storage.manifest import Broken
from phalanx.errors import CheckpointError


def export(place: Storage, entry: Entry, out: Path, trust: bool) -> int:
    """Writes the tensors of the model, under their own names; returns how many."""
    try:
        nested, _ = open_content(place, entry, trust).read({"model"}, 0)
    except Broken as error:
        raise CheckpointError(f"{entry.directory} in {place} is damaged: {error}.") from None
    tensors = {name: value for name, value in nested.get("model", {}).items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{entry.directory} in {place} has no model to export; it was saved without one.")
    aside = out.with_name(f".{out.name}-{uuid.uuid4().hex[:8]}")
    try:
        save_file(tensors, aside, metadata={"format": "pt", "step": str(entry.step)})
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {getattr(error, 'strerror', None) or error}.") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()
    return len(tensors)
