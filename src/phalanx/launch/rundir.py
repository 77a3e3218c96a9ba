"""The layout of a run directory: where each rank's logs, failure, stacks and trace lie.

    runs/20261115-204211-train/
      run.json                       what was run, where, when, and how it ended
      attempt-0/                     one a start; the elastic agent may restart
        rank-00000/stdout.log  stderr.log  error.json  stacks.txt  status.json
        trace-rank00000.jsonl        with tracing on

Owns paths, who may read them, and `run.json`; knows nothing of what the files hold. Output, tracebacks and
arguments are nobody else's business: folders are 0700 and files 0600, whatever the umask says.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.errors import ConfigError, StateError

FACTS = "run.json"
_LONGEST_NAME = 100
_MOST_LINKS = 40  # the system follows no more either
LONGEST = 1 << 24
"""Of any text that is read at once. A file from elsewhere may seem to have terabytes and take no room on the disk; and JSON
takes up to thirty times as much in memory."""


def open_private(path: Path) -> int:
    """A descriptor of `path`, made new and empty, that only its owner may open. Fails where `path` exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def open_plain(path: Path) -> BinaryIO:
    """`path` to be read, which may be anybody's. Raises OSError, and StateError for what is there and is no file: reading a
    pipe waits for ever, a device may never end."""
    is_plain = path.is_file() or not path.exists()  # before it is opened: to some devices that alone does something
    if is_plain:
        # Without waiting, and asked again of what was opened: it may be another than a moment ago.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return open(descriptor, "rb")
        os.close(descriptor)
    raise StateError(f"{path} is not a plain file. Do not read folders of which you do not know who made them.")


def replace_private(path: Path, text: str) -> None:
    """Make `path` hold `text`, in one move, so a reader never sees half of it. A link there is replaced, not followed."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        with open(open_private(fresh), "w") as file:
            file.write(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def read_record(path: Path) -> Any:
    """The JSON value in a file that may be anybody's. Raises FileNotFoundError, and StateError for what is no record."""
    try:
        with open_plain(path) as file:
            text = file.read(LONGEST + 1)
        if len(text) > LONGEST:
            raise ValueError(f"it is longer than {LONGEST >> 20} MiB")
        return json.loads(text.decode())
    except (FileNotFoundError, StateError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path} cannot be read: {error}") from None


def make_private(path: Path) -> None:
    """A new folder that only its owner may enter. Fails where `path` exists, be it a link."""
    path.mkdir(mode=0o700)
    path.chmod(0o700)


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in one attempt."""

    directory: Path

    @property
    def stdout(self) -> Path:
        return self.directory / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.directory / "stderr.log"

    @property
    def error(self) -> Path:
        return self.directory / "error.json"

    @property
    def stacks(self) -> Path:
        return self.directory / "stacks.txt"

    @property
    def status(self) -> Path:
        return self.directory / "status.json"


class RunDirectory:
    """One run's directory. Creating it makes the folder; reading an existing one changes nothing."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    @staticmethod
    def create(parent: str | os.PathLike[str], name: str) -> RunDirectory:
        """A new directory under `parent`, named after the time and `name`; unique even within a second."""
        # Cut: with the time before it, the name of a file would be too long for a folder's.
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:_LONGEST_NAME] or "run"
        stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}"
        try:
            # Before anything is made there, and after: what was not there yet, somebody else may have made meanwhile.
            _refuse_foreign(Path(parent))
            _make_parents(Path(parent))
            _refuse_foreign(Path(parent))
        except OSError as error:
            raise ConfigError(f"cannot create a run directory under {parent}: {error}") from None
        for number in range(1000):
            root = Path(parent) / (stem if number == 0 else f"{stem}-{number}")
            try:
                make_private(root)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"cannot create a run directory under {parent}: {error}") from None
            return RunDirectory(root)
        raise ConfigError(f"a thousand runs named {stem} exist already under {parent}")

    def attempt(self, number: int) -> Path:
        """The folder of the `number`-th start, counted from 0."""
        return self.root / f"attempt-{number}"

    def rank(self, attempt: int, rank: int) -> RankFiles:
        """The files of one rank; its folder exists afterwards."""
        directory = self.attempt(attempt) / f"rank-{rank:05d}"
        for folder in (directory.parent, directory):
            with contextlib.suppress(FileExistsError):
                make_private(folder)
        return RankFiles(directory)

    def last_attempt(self) -> Path | None:
        """The folder of the latest start, or None when nothing was started here."""
        attempts = [path for path in self.root.glob("attempt-*") if path.name[8:].isdecimal()]
        return max(attempts, key=lambda path: int(path.name[8:]), default=None)

    def facts(self) -> dict[str, Any]:
        """What `run.json` holds; empty when the directory has none."""
        try:
            facts = read_record(self.root / FACTS)
        except FileNotFoundError:
            return {}
        if not isinstance(facts, dict):
            raise StateError(f"{self.root / FACTS} should hold an object, it holds {type(facts).__name__}")
        return facts

    def record(self, **facts: Any) -> None:
        """Add to `run.json`."""
        replace_private(self.root / FACTS, json.dumps(self.facts() | facts, indent=2, default=str) + "\n")


def _make_parents(parent: Path) -> None:
    """Missing folders above the run, which others may enter but, whatever the umask, not change."""
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another run makes it at the same time
            folder.mkdir(mode=0o755)
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent} is not a folder")


def _refuse_foreign(parent: Path) -> None:
    """Refuse a place where another user could swap the run's folder for one of theirs, or for a link.

    Trusted are this user, root, and whoever owns the working directory, who can change the script as well.
    """
    here = Path.cwd()
    # In a user namespace root has another number, which the owner of / tells.
    trusted = {os.geteuid(), 0, here.stat().st_uid, Path("/").stat().st_uid}
    for step in _way_to(parent):
        if step == here or step in here.parents:
            continue
        status = step.lstat()
        writable_by_all = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
        if status.st_uid not in trusted:
            fault = f"belongs to user {status.st_uid}"
        elif writable_by_all and not stat.S_ISLNK(status.st_mode):
            fault = "can be changed by every user"
        else:
            continue
        raise ConfigError(
            f"--run-dir {parent}: {step} {fault}, who could put anything in the place of the run's files. Choose a "
            "folder of your own."
        )


def _way_to(place: Path) -> Iterator[Path]:
    """Every folder and every link that the system looks at on the way to `place`, as far as there is one.

    Whoever can change any of them leads the way somewhere else: also one behind a link, which the path itself does not name.
    """
    at, rest = Path("/"), list(reversed(place.absolute().parts))
    num_links = 0
    while rest:
        part = rest.pop()
        step = at.parent if part == ".." else at / part
        if not step.is_symlink() and not step.exists():
            return
        yield step
        if step.is_symlink() and num_links < _MOST_LINKS:
            num_links += 1
            rest += reversed(Path(os.readlink(step)).parts)  # an absolute one begins with "/", which takes `at` there
        else:
            at = step
