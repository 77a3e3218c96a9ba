"""Every operation on files that a save makes, one method each: the only way to the disk for whoever writes.

A test can stop a save after any of them by deriving from `Disk`. What a save relies on: a file that was synced holds what
was written to it; a rename happens whole or not at all, and lasts once its folder was synced. `RemoteDisk` is for storages
without the last: there a commit counts only if all of it is there, which its own last line tells.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
from typing import Any, BinaryIO

from ...errors import ConfigError

# Not every system has it; without it nothing is asked for.
_DIRECT: int = getattr(os, "O_DIRECT", 0)

LONGEST_BYTES = 1 << 28
"""Of a small file, read and written. One from elsewhere may seem to have terabytes and take no room on the disk."""


class Disk:
    """A folder of the operating system: local, or mounted from elsewhere."""

    renames_at_once = True

    # -- what a save does ----------------------------------------------------------------------

    def make_folder(self, path: str) -> None:
        """Make a folder, and those above it; it may be there already."""
        os.makedirs(path, exist_ok=True)

    def make_root(self, path: str) -> None:
        """Make the folder of all saves, for good: a power cut that takes its name takes all that was committed in it."""
        missing = []
        above = path
        while not os.path.exists(above) and above != os.path.dirname(above):
            missing.append(above)
            above = os.path.dirname(above)
        self.make_folder(path)
        for made in reversed(missing):
            self.sync_folder(os.path.dirname(made) or ".")

    def create(self, path: str) -> Any:
        """A handle of a new file. Fails if there is one: nothing that was saved is ever written over."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def pass_cache(self, handle: Any) -> None:
        """Let whole blocks go from memory to the disk without a copy in the page cache, where that can be had.

        A checkpoint is not read again soon; copying it costs the processor as much as training's own copy did, and a
        busy machine several times that. Only a hint: what a file system or a disk refuses goes through the cache.
        """
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | _DIRECT)

    def write(self, handle: Any, data: memoryview) -> None:
        """Write all of `data` at the end."""
        while data:
            try:
                data = data[os.write(handle, data) :]
            except OSError as error:
                # The last block is seldom a whole one, and some file systems say only now that they know no other way.
                flags = fcntl.fcntl(handle, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~_DIRECT)

    def sync(self, handle: Any) -> None:
        """Return when what was written will survive a power cut."""
        os.fsync(handle)

    def close(self, handle: Any) -> None:
        """Close the file."""
        os.close(handle)

    def rename(self, old: str, new: str) -> None:
        """Give a file its name, at once and whole. A file of that name is replaced."""
        os.rename(old, new)

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder will survive a power cut."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network filesystems know no such thing; their renames are as durable as they get.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(handle)

    def publish(self, folder: str, name: str, data: bytes, by: str) -> None:
        """Make a small file appear whole and for good. `by` tells apart those who may publish the same at once."""
        if len(data) > LONGEST_BYTES:
            raise _too_long(f"{folder}/{name}")  # nobody could read it again
        draft = f"{folder}/.{name}.{by}"
        with contextlib.suppress(FileNotFoundError):
            self.remove(draft)  # of somebody of the same name who was stopped here
        handle = self.create(draft)
        try:
            self.write(handle, memoryview(data))
            self.sync(handle)
        finally:
            self.close(handle)
        self.rename(draft, f"{folder}/{name}")
        self.sync_folder(folder)

    def tell(self, handle: int, message: bytes) -> None:
        """Send a message to the training process."""
        while message:
            message = message[os.write(handle, message) :]

    def remove(self, path: str) -> None:
        """Delete a file."""
        os.remove(path)

    def remove_folder(self, path: str) -> None:
        """Delete a folder with all that is in it."""
        try:
            shutil.rmtree(path)
        except RecursionError:
            raise OSError(errno.ELOOP, "its folders are too deep, remove it with rm -r", path) from None

    def is_link(self, path: str) -> bool:
        """Whether a name is only a link to what lies elsewhere."""
        return os.path.islink(path)

    # -- what a reader does --------------------------------------------------------------------

    def names(self, folder: str) -> list[str]:
        """What a folder holds; nothing if there is no such folder."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(folder))
        return []

    def size(self, path: str) -> int:
        """The size of a file. Raises FileNotFoundError."""
        return os.stat(path).st_size

    def modified(self, path: str) -> float:
        """When a file or folder was last written, in seconds of the epoch."""
        return os.stat(path).st_mtime

    def read(self, path: str) -> bytes:
        """All of a small file."""
        with open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > LONGEST_BYTES:
                raise _too_long(path)
            return file.read()

    def view(self, path: str, size: int) -> Any:
        """The first `size` bytes of a file, as something that can be sliced; read when they are looked at."""
        if not size:
            return memoryview(bytearray())
        with open_plain(path) as file:
            # A private copy: torch wants memory that it might write to. It is only ever read, so no page is copied.
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))


def open_plain(path: str) -> BinaryIO:
    """A file to be read. Raises OSError, also for what is no file: in a folder from elsewhere a name may be that of a pipe,
    which waits for ever, or of a device without an end."""
    is_plain = os.path.isfile(path) or not os.path.exists(path)  # before: opening alone does something to some devices
    if is_plain:
        # Without waiting, and asked again of what was opened: it may be another than a moment ago.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return open(descriptor, "rb")
        os.close(descriptor)
    raise OSError(errno.EINVAL, "not a plain file", path)


def _too_long(path: str) -> OSError:
    return OSError(errno.EFBIG, f"it has more than {LONGEST_BYTES >> 20} MiB, as no manifest should", path)


class RemoteDisk(Disk):
    """Whatever fsspec reaches. Files appear when they are closed; there is nothing to sync and no rename."""

    renames_at_once = False

    def __init__(self, url: str, options: dict[str, Any] | None = None) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(f"the folder {url!r} needs fsspec. Install phalanx[fsspec].") from error
        try:
            self._system, _ = fsspec.core.url_to_fs(url, **(options or {}))
        except (ImportError, ValueError) as error:
            raise ConfigError(f"fsspec cannot reach {url!r}: {error}") from error
        # Listings that are remembered would show neither what other ranks wrote nor what somebody deleted.
        self._system.use_listings_cache = False

    def make_folder(self, path: str) -> None:
        self._system.makedirs(path, exist_ok=True)

    def make_root(self, path: str) -> None:
        self.make_folder(path)

    def create(self, path: str) -> Any:
        if self._system.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self._system.open(path, "wb")

    def pass_cache(self, handle: Any) -> None:
        pass

    def write(self, handle: Any, data: memoryview) -> None:
        handle.write(data)

    def sync(self, handle: Any) -> None:
        handle.flush()

    def close(self, handle: Any) -> None:
        handle.close()

    def sync_folder(self, path: str) -> None:
        pass

    def publish(self, folder: str, name: str, data: bytes, by: str) -> None:
        # One put: object stores show all of it or nothing. Where that is not so, readers see by its last line that a
        # commit is not whole, and a manifest by its hash in the commit.
        self._system.pipe_file(f"{folder}/{name}", data)

    def remove(self, path: str) -> None:
        self._system.rm_file(path)

    def remove_folder(self, path: str) -> None:
        self._system.rm(path, recursive=True)

    def is_link(self, path: str) -> bool:
        return False

    def names(self, folder: str) -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def size(self, path: str) -> int:
        return int(self._system.size(path))

    def modified(self, path: str) -> float:
        try:
            return float(self._system.modified(path).timestamp())
        except (NotImplementedError, FileNotFoundError):
            return float("inf")  # unknown, so never old enough to be taken for abandoned

    def read(self, path: str) -> bytes:
        return bytes(self._system.cat_file(path))

    def view(self, path: str, size: int) -> Any:
        return _Ranges(self._system, path)


class _Ranges:
    """A remote file of which only the slices that are asked for travel."""

    def __init__(self, system: Any, path: str) -> None:
        self._system, self._path = system, path

    def __getitem__(self, range_: slice) -> memoryview:
        data = self._system.cat_file(self._path, start=range_.start, end=range_.stop)
        return memoryview(bytearray(data))


def is_remote(folder: str) -> bool:
    """Whether a folder is an address for fsspec."""
    return "://" in folder


def disk_of(folder: str, options: dict[str, Any] | None = None) -> Disk:
    """The disk that a folder is on: one with a `protocol://` is reached through fsspec."""
    if is_remote(folder):
        return RemoteDisk(folder, options)
    if options:
        raise ConfigError(f"storage options have a meaning only for addresses like s3://…, not for the folder {folder!r}.")
    return Disk()
