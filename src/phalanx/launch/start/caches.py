"""Where `torch.compile` keeps what it has compiled: never in a folder that another user could fill.

That is `torchinductor_` and the user's name in the system's folder for temporary files, in which everybody may make a folder
of that name first. Torch takes it as it finds it, and runs what is in it.

    the launcher     looks whether it is there, and another user's: then the run has temporary files of its own
    each worker      makes it when torch loads what uses it; of a run that compiles nothing, nothing is left

Owns which folder for temporary files workers are told of; runs without torch.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib.abc
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.comm.failure.waiting import Notice
from phalanx.errors import ConfigError

# The part of torch that reads and writes the folder. Others of its package are loaded by every optimizer.
_USER = "torch._inductor.codecache"


@contextlib.contextmanager
def own_temporaries(notice: Notice) -> Iterator[dict[str, str]]:
    """What workers need in their environment so that they run code of nobody else; nothing where torch's folder is ours.

    Not TORCHINDUCTOR_CACHE_DIR: headers, and some of what torch keeps, are in the usual place whatever it says.
    """
    fault = _fault() if os.path.lexists(usual_cache()) else ""
    if not fault:
        yield {}
        return
    # Not in the run's folder: names of sockets, of which multiprocessing puts some there, are short.
    with tempfile.TemporaryDirectory(prefix="phalanx-", ignore_cleanup_errors=True) as folder:
        notice(
            f"{usual_cache()} {fault}, and torch.compile would run what is in it: temporary files of this run are in "
            f"{folder} and go with it. Have it removed, or set TMPDIR to a folder of your own."
        )
        yield {"TMPDIR": folder}


def usual_cache() -> Path:
    """Where torch looks. tests/security/test_caches.py compares it with torch's own."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


class _Guard(importlib.abc.MetaPathFinder):
    """Finds nothing, but is asked before anybody else."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == _USER:
            sys.meta_path.remove(self)
            _make_usual()


def guard_cache() -> None:
    """In a worker, before its script runs: torch will not use a folder that somebody has made since the run began."""
    if _USER in sys.modules:
        _make_usual()
    else:
        sys.meta_path.insert(0, _Guard())


def _make_usual() -> None:
    """Make torch's folder, if it is not there. In a folder like /tmp what is ours stays ours."""
    with contextlib.suppress(OSError):
        usual_cache().mkdir(mode=0o700, exist_ok=True)
    if fault := _fault():
        raise ConfigError(
            f"{usual_cache()} {fault}, and torch.compile would run what is in it. Have it removed, or set TMPDIR to a "
            "folder of your own."
        )


def _fault() -> str:
    """What is wrong with torch's folder, in words."""
    folder = usual_cache()
    try:
        found = folder.lstat(), folder.stat()  # also of a link: whoever made it chose where it leads
    except OSError:
        return "cannot be used"
    for status in found:
        if status.st_uid not in (os.geteuid(), 0):
            return f"belongs to user {status.st_uid}"
    return "can be changed by every user" if found[1].st_mode & stat.S_IWOTH else ""
