"""Whether this process may be forked into workers: nothing in it may belong to one process only.

A forked child has the memory of all threads and runs only one: a lock that another thread held is held for ever. And a
device that was opened before the fork cannot be used after it. Importing torch and phalanx leaves neither; what a site
hook or a plug-in of torch imports may, and then workers are started plainly.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

# Character devices that any process may have open. What computes on a device has its own node under /dev.
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/pts/", "/dev/console")
_ACCELERATORS = ("cuda", "xpu", "mtia", "npu", "hpu", "mps")


def unfit() -> str:
    """Why this process must not be forked; empty when it may."""
    # OpenBLAS starts its threads when numpy is imported and ends them before a fork, by a handler of its own. So one fork
    # is made for nothing; threads that are still here then are of somebody who does not know of forks.
    _fork_for_nothing()
    threads = [_name(task) for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    if threads:
        return f"imports started {len(threads)} threads ({', '.join(sorted(set(threads)))})"
    opened = _open_devices()
    if opened:
        return f"imports opened {', '.join(opened)}"
    torch = sys.modules.get("torch")
    for name in _ACCELERATORS:
        is_initialized = getattr(getattr(torch, name, None), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return f"imports initialised torch.{name}"
    return ""


def _fork_for_nothing() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def _name(task: str) -> str:
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    except OSError:
        return "one that has ended since"


def _open_devices() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            is_device = stat.S_ISCHR(os.stat(int(descriptor)).st_mode)
        except OSError:
            continue  # the folder's own descriptor
        if is_device and int(descriptor) > 2 and not target.startswith(_HARMLESS):
            found.append(target)
    return sorted(set(found))
