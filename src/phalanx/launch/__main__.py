"""``python -m phalanx.launch``: the flags of ``python -m torch.distributed.launch``."""

import sys

from phalanx import entry_point
from phalanx.system import require_linux


def _launch() -> int:
    require_linux("phalanx.launch")
    from phalanx.launch import command

    return command.run(sys.argv[1:], is_launch=True)


if __name__ == "__main__":
    entry_point.run(_launch)
