"""Where what is made of a run is written: a page, a trace for another tool. Through nothing that came with the run.

A run's folder may be somebody else's, or an archive's: whatever lies there under the file's name, a link to a file of ours
or a pipe, is replaced and not written to. Elsewhere a device or a link of one's own is where the user wants it to go.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def write_made(text: str, path: str | Path, run_folder: Path) -> Path:
    """Write `text`, made of the run in `run_folder`, to `path`, and return that. Raises OSError."""
    # A script's name may hold bytes that are no text, for which Python has characters that are none.
    data = text.encode("utf-8", "replace")
    target = Path(path)
    if not target.name:  # "." or "/", beside which no file can be made
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    is_inside = target.parent.resolve() == run_folder.resolve()
    if not is_inside and _leads_on(target):
        target.write_bytes(data)
        return target
    # In a run's folder nobody else may read it, as all that is there: the folder may be somebody else's, and lead to files
    # that only we can read.
    mode = 0o600 if is_inside else 0o666
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        fresh.replace(target)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return target


def _leads_on(target: Path) -> bool:
    """Whether it is a device, or a pipe or a link that this user or the system has made.

    Written to, as by any program: root who puts a file in the place of /dev/null takes it from everybody.
    """
    try:
        status = target.lstat()
    except OSError:
        return False
    is_ours = status.st_uid in (os.geteuid(), 0)
    return stat.S_ISCHR(status.st_mode) or (is_ours and (stat.S_ISLNK(status.st_mode) or stat.S_ISFIFO(status.st_mode)))
