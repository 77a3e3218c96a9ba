"""Where `torch.compile` keeps what it has compiled: never in a folder that another user could fill.

That is `torchinductor_` and the user's name in the system's folder for temporary files, in which everybody may make a folder
of that name first. Torch takes it as it finds it, and runs what is in it.

    the launcher     looks whether it is there, and another user's: then the run has temporary files of its own
    each worker      makes it before torch does, and looks again when torch loads what uses it

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

# The part of torch that reads and writes the folder; and the one that makes it, which every optimizer loads. What that makes
# every user can change where the umask says so.
_USER, _MAKER = "torch._inductor.codecache", "torch._dynamo.package"
_ELSEWHERE = "TORCHINDUCTOR_CACHE_DIR"


@contextlib.contextmanager
def own_temporaries(notice: Notice) -> Iterator[dict[str, str]]:
    """What workers need in their environment so that they run code of nobody else; nothing where torch's folder is ours.

    Not TORCHINDUCTOR_CACHE_DIR: headers, and some of what torch keeps, are in the usual place whatever it says.
    """
    usual = usual_cache()
    fault = _fault(usual) if usual is not None and os.path.lexists(usual) else ""
    if usual is None or not fault:
        yield {}
        return
    # Not in the run's folder: names of sockets, of which multiprocessing puts some there, are short.
    with tempfile.TemporaryDirectory(prefix="phalanx-", ignore_cleanup_errors=True) as folder:
        notice(
            f"{usual} {fault}, and torch.compile would run what is in it: temporary files of this run are in "
            f"{folder} and go with it. Have it removed, or set TMPDIR to a folder of your own."
        )
        # Torch itself sets the other variable to the usual place, for whatever a program with an optimizer starts.
        inherited = _ELSEWHERE in os.environ and _keeps_all_in(usual)
        yield {"TMPDIR": folder} | ({_ELSEWHERE: os.path.join(folder, usual.name)} if inherited else {})


def usual_cache() -> Path | None:
    """Where torch looks; None where it can keep no temporary files, and fails where it needs some.

    tests/security/test_caches.py compares it with torch's own.
    """
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        return None
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(temporary) / ("torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _keeps_all_in(usual: Path) -> bool:
    """Whether torch has been told of no other place."""
    return os.path.abspath(os.environ.get(_ELSEWHERE, usual)) == str(usual)


class _Guard(importlib.abc.MetaPathFinder):
    """Finds nothing, but is asked before anybody else."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == _MAKER and (usual := usual_cache()) is not None and _keeps_all_in(usual):
            _make(usual)
        elif name == _USER:
            # And stays: if it took itself away now, the finder after it would be skipped, which may be the one of torch.
            _make_usual()


def guard_cache() -> None:
    """In a worker, before its script runs: torch will not use a folder that somebody has made since the run began."""
    if _USER in sys.modules:
        _make_usual()
    else:
        sys.meta_path.insert(0, _Guard())


def _make_usual() -> None:
    """Make torch's folder, if it is not there. In a folder like /tmp what is ours stays ours."""
    usual = usual_cache()
    if usual is None:
        return
    _make(usual)
    if fault := _fault(usual):
        raise ConfigError(
            f"{usual} {fault}, and torch.compile would run what is in it. Have it removed, or set TMPDIR to a folder of "
            "your own."
        )


def _make(usual: Path) -> None:
    with contextlib.suppress(OSError):  # `_fault` says what is wrong
        usual.mkdir(mode=0o700, exist_ok=True)


def _fault(usual: Path) -> str:
    """What is wrong with torch's folder, in words."""
    try:
        found = usual.lstat(), usual.stat()  # also of a link: whoever made it chose where it leads
    except OSError:
        return "cannot be used"
    for status in found:
        if status.st_uid not in (os.geteuid(), 0):
            return f"belongs to user {status.st_uid}"
    return "can be changed by every user" if found[1].st_mode & stat.S_IWOTH else ""
