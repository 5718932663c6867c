"""The moments at which the test stops a program of this directory, and the skew between its ranks."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

RANK = int(os.environ["RANK"])
PLACE = Path(sys.argv[1])


def reach(moment: str, seconds: float = 0.0) -> None:
    """Tells the test that this rank is there, and stays for so long."""
    mark = PLACE / f"{moment}-{RANK}"
    if not mark.exists():
        mark.write_text(str(os.getpid()))
    time.sleep(seconds)


def step(number: int) -> None:
    """In each training step: one rank is often late, and the others wait for it in their collectives."""
    reach("first" if number == 0 else "steps" if number > 5 else "early")
    if random.random() < 0.2 and number // 10 % 2 == RANK:
        time.sleep(0.05)
