"""The lines that a checkpointer prints, and the events that it writes to the run directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from phalanx.events import rank_events_path
from phalanx.run_files import EventLog
from phalanx.status import own_page


def print_line(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


def log_event(rank: int, event: str, *, step: int, **fields: float | str) -> None:
    """Writes one line to the rank's event file, if ``phalanx run`` has started it, and the step to its status page."""
    page = own_page.current()
    if page is not None and event in ("saved", "loaded"):
        seconds = fields.get("seconds", 0.0) if event == "saved" else 0.0
        page.checkpointed(step, float(seconds))
    directory = os.environ.get("PHALANX_RUN_DIR")
    if not directory or not Path(directory).is_dir():
        return
    log = EventLog(rank_events_path(Path(directory), rank))
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}
    log.write(event, step=step, **rounded)
    log.close()
