"""What the fork server imports once, so that a forked worker starts in milliseconds.

Importing must start no thread: a process forked from one with threads may inherit a lock that
nobody will ever release. `tests/test_cluster.py` asserts it.
"""

import gc
import os
import traceback

import hypothesis  # noqa: F401  (test modules import these; once here is cheaper than once a worker)
import numpy  # noqa: F401
import psutil  # noqa: F401
import pytest  # noqa: F401
import torch

# What torch's own classes import on first use: some of these modules keep the default group that lives
# at that moment, and its threads, for good, which would look like a leak of the code under test.
import torch._dynamo
import torch._inductor.compile_fx  # half of what a worker's first compilation would take
import torch.distributed.algorithms.ddp_comm_hooks
import torch.distributed.nn
import torch.distributed.optim
import torch.distributed.rpc
import torch.nn.parallel
import torch.testing

from tests.cluster import asides

asides.leave_operators_registered()

PHALANX_IMPORT_ERROR: str | None = None
try:
    import phalanx  # noqa: F401  (registers the process group backend "phalanx")
except Exception:
    # Raised again in each call: an exception here would end the fork server, and with it the reason.
    PHALANX_IMPORT_ERROR = traceback.format_exc()

asides.take_names_from_files()
asides.keep_no_stacks_of_seeds()
torch.set_num_threads(1)
# All of this is shared between the workers; freezing keeps the collector from writing to its pages.
gc.freeze()
asides.gather_pages()

THREADS_AFTER_IMPORT = len(os.listdir("/proc/self/task"))
