"""``python -m phalanx.launch``: the flags of ``python -m torch.distributed.launch``."""

from phalanx.cli import launch_main

if __name__ == "__main__":
    launch_main()
