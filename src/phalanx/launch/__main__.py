"""``python -m phalanx.launch``: the flags of ``python -m torch.distributed.launch``."""

import sys

from phalanx import entry_point, systems


def _launch() -> int:
    systems.require_linux("phalanx.launch")
    from phalanx.launch import command

    return command.launch(sys.argv[1:])


if __name__ == "__main__":
    entry_point.run(_launch)
