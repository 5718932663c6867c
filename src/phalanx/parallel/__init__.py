"""One model on several processes or devices, by one call.

wrap.py        data_parallel: checks its arguments and calls one of the others
ddp.py         "ddp": torch's DistributedDataParallel, with parameter names in errors, and compressed gradients
alone.py       the same interface in one process, so that the same script runs alone; state dicts without `module.`
replicas.py    "dp" and "replicate": one process, several copies of the model, in threads
split.py       "split": one process, the parts of a model on several devices
batchnorm.py   batch norm over the batches of all ranks, on CPUs, where torch's does not work
"""

from __future__ import annotations

from phalanx.parallel.wrap import data_parallel

__all__ = ["data_parallel"]
