"""Where `torch.compile` keeps what it has compiled: never in a folder that another user could fill.

That is `torchinductor_` and the user's name in the system's folder for temporary files, in which everybody may make a folder
of that name first. Torch takes it as it finds it, and runs what is in it. Owns which folder for temporary files workers are
told of; runs without torch.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from phalanx.comm.failure.waiting import Notice


@contextlib.contextmanager
def own_temporaries(notice: Notice) -> Iterator[dict[str, str]]:
    """What workers need in their environment so that they run code of nobody else; nothing where torch's folder is ours.

    Not TORCHINDUCTOR_CACHE_DIR: headers, and some of what torch keeps, are in the usual place whatever it says.
    """
    fault = _make_usual()
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


def _make_usual() -> str:
    """Make torch's folder, if it is not there; what is wrong with it, in words.

    Not left to torch: until then anybody could. In a folder like /tmp what is ours stays ours.
    """
    folder = usual_cache()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat(), folder.stat()  # also of a link: whoever made it chose where it leads
    except OSError:
        return "cannot be used"
    for status in found:
        if status.st_uid not in (os.geteuid(), 0):
            return f"belongs to user {status.st_uid}"
    return "can be changed by every user" if found[1].st_mode & stat.S_IWOTH else ""
