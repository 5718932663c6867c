"""The benchmark of what the recorder costs, as ``phalanx bench recorder`` runs it; results go beside this file."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.cli import main

if __name__ == "__main__":
    main(["bench", "recorder", "--out", str(Path(__file__).parent / "results"), *sys.argv[1:]])
