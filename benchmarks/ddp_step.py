"""The benchmark of DDP's training steps, as ``phalanx bench ddp-step`` runs it; results go beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.cli import main

if __name__ == "__main__":
    main(["bench", "ddp-step", "--wrappers", "--out", str(Path(__file__).parent / "results"), *sys.argv[1:]])
