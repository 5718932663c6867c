"""One model on several processes or devices, by one call.

wrap.py        data_parallel: what was asked for, checked, and handed to one of the others
ddp.py         "ddp": torch's DistributedDataParallel, with its errors in names and gradients compressed by name
alone.py       the same interface in one process, so that the same script runs alone
replicas.py    "dp" and "replicate": one process, several copies of the model, in threads
split.py       "split": one process, the parts of a model on several devices
batchnorm.py   batch norm over the batches of all ranks, on CPUs, where torch's does not work
names.py       state dicts without the prefix `module.`
"""

from __future__ import annotations

from phalanx.parallel.wrap import data_parallel

__all__ = ["data_parallel"]
