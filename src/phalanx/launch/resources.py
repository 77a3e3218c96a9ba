"""What this machine has for workers to share, found without torch, which the launcher does not import."""

from __future__ import annotations

import glob
import os
import sys
from importlib.metadata import entry_points

# Where the kernel shows what torch has a device type for: NVIDIA, AMD, Intel and others, WSL, Ascend, Gaudi, TPU.
_ACCELERATOR_NODES = ("/dev/nvidia*", "/dev/kfd", "/dev/dri/render*", "/dev/dxg", "/dev/davinci*", "/dev/hl*", "/dev/accel*")


def threads_for(local_world: int) -> int:
    """An even share of the cores this process may use, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world)


def may_have_accelerators() -> bool:
    """Whether torch could find a device here, as far as can be told without it: by nodes in /dev, and by its plug-ins."""
    if sys.platform != "linux":
        return True
    if any(glob.glob(pattern) for pattern in _ACCELERATOR_NODES):
        return True
    # Ours is one of the plug-ins, and brings no device.
    return any(not plugin.value.startswith("phalanx") for plugin in entry_points(group="torch.backends"))
