"""What a checkpointer tells people, and the run directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from phalanx.events import EventLog, rank_events_path
from phalanx.status import own_page


def say(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr, flush=True)


def note(rank: int, event: str, **fields: Any) -> None:
    """One line in the rank's event file, if ``phalanx run`` has made a place for it; its page holds the last step."""
    page = own_page.current()
    if page is not None and event in ("saved", "loaded"):
        page.checkpointed(fields["step"])
    directory = os.environ.get("PHALANX_RUN_DIR")
    if not directory or not Path(directory).is_dir():
        return
    log = EventLog(rank_events_path(Path(directory), rank))
    log.write(event, **{name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()})
    log.close()
