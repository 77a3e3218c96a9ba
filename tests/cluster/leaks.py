"""What a piece of code leaves behind in its process: taken before, taken after, compared.

Used by the workers around each call and by conftest around each test in the pytest process.
Knows nothing of ranks, calls or pytest, and does not import torch: a test run that never needs
torch should not pay for it.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

SHM_DIR = Path("/dev/shm")
# Set, to the pid of the pytest process, in every process that the cluster starts.
RUN_VARIABLE = "PHALANX_TEST_RUN"
# Operating system threads that serve a process group, a store or an rpc agent and must end with it.
# A list of the guilty, since torch keeps other threads for good (autograd, OpenMP, interop).
GROUP_THREADS = ("gloo_", "pt_gloo_", "pt_tcpstore_", "pt_thread_pool", "TP_")
# Helpers that multiprocessing starts once in a process and keeps until the process ends.
PERMANENT_CHILDREN = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
# And processes that the tests keep for the whole run.
PERMANENT_PIDS: set[int] = set()
# A build option of the kernel, which most have.
_KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()
# Set by pytest for every test, and by torch when dynamo is first imported.
CHANGING_VARIABLES = frozenset({"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"})


class Leak(enum.StrEnum):
    """The kinds of things that may be left behind, and the words that switch a check off."""

    THREADS = "threads"
    NATIVE_THREADS = "native_threads"
    CHILDREN = "children"
    GROUPS = "groups"
    SHM = "shm"
    MEMFD = "memfd"
    ENVIRONMENT = "environment"


@dataclass(frozen=True)
class Snapshot:
    """The things of one process at one moment."""

    threads: dict[int, str]
    native: Counter[str]
    children: dict[int, str]
    groups: int
    shm_names: frozenset[str]
    memfds: int
    environment: dict[str, str]
    torch_modules: int


def take_snapshot() -> Snapshot:
    """Look at the calling process."""
    return Snapshot(
        threads={t.ident: t.name for t in threading.enumerate() if t.ident is not None},
        native=_group_threads(),
        children=_children(),
        groups=_group_count(),
        shm_names=shm_names(),
        memfds=len(_memfd_inodes()),
        environment=dict(os.environ),
        torch_modules=_torch_modules(len(sys.modules)),
    )


class Watch:
    """Looks at the calling process before and after each of many pieces of code, one at a time.

    A look takes milliseconds, most of them the kernel's, to list the mappings of a process that has torch. So where code
    has left nothing, what was there at its end is what the next piece of code begins with.
    """

    def __init__(self) -> None:
        self._before: Snapshot | None = None

    def begin(self) -> None:
        """Whatever is here from now on and was not here now is a leak."""
        if self._before is None:
            self._before = take_snapshot()

    def leaks(self, allowed: Collection[str] = (), grace_s: float = 2.0) -> list[str]:
        """Sentences about what is here and was not at the beginning; waits up to `grace_s` for it to go.

        The grace is for threads that were told to stop and have not been scheduled yet, and garbage is
        collected during it, since a dead cycle is not a leak. Code that leaves nothing costs no waiting.
        """
        before, self._before = self._before, None
        assert before is not None, "a watch begins before it ends"
        deadline = time.monotonic() + grace_s
        while True:
            now = take_snapshot()
            found = {kind: check(before, now) for kind, check in _CHECKS.items()}
            leaks = [line for kind, lines in found.items() if kind not in allowed for line in lines]
            if not leaks or time.monotonic() > deadline:
                break
            gc.collect()
            time.sleep(0.02)
        # What was allowed to stay may go at any time, and so may what a first import hides: both would later make
        # room, in a count, for a leak.
        if not any(found.values()) and now.torch_modules == before.torch_modules:
            self._before = now
        return leaks


def shm_names() -> frozenset[str]:
    """What /dev/shm holds now, of everybody on the machine.

    Without the semaphores of Python's multiprocessing: we make none, and those of another test's data loaders, once their
    processes have ended and the resource tracker has not, are held by nobody.
    """
    names = os.listdir(SHM_DIR) if SHM_DIR.is_dir() else []
    return frozenset(name for name in names if not name.startswith("sem.mp-"))


def shm_leaks(before: Collection[str]) -> list[str]:
    """Files in /dev/shm that are new since `before`, without those held by somebody else's process.

    The directory belongs to the whole machine, so a new name alone proves nothing: another test run
    may be at work beside this one.
    """
    new = sorted(shm_names().difference(before))
    held = _shm_names_held_by_others() if new else set()
    return [f"shm: {SHM_DIR}/{name}" for name in new if name not in held]


def _group_threads() -> Counter[str]:
    names: Counter[str] = Counter()
    for task in os.listdir("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        except OSError:  # the thread ended while we looked
            continue
        names[name] += name.startswith(GROUP_THREADS)
    return +names


def _children() -> dict[int, str]:
    found = {}
    for pid in _child_pids():
        if pid in PERMANENT_PIDS:
            continue
        try:
            child = psutil.Process(pid)
            command = " ".join(child.cmdline()) or child.name()
        except psutil.Error:  # ended and reaped while we looked
            continue
        if any(helper in command for helper in PERMANENT_CHILDREN):
            PERMANENT_PIDS.add(pid)  # it lives as long as this process: asked once
        else:
            found[pid] = command
    return found


def _child_pids() -> list[int]:
    """The direct children of this process.

    From the kernel's own lists, one per thread, where it keeps them: psutil reads the state of every process
    on the machine, and this is asked twice per test, and twice per call and rank.
    """
    if not _KERNEL_LISTS_CHILDREN:
        return [child.pid for child in psutil.Process().children()]
    pids: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread ended while we looked; another has its children now
            pids += map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())
    return pids


@lru_cache(maxsize=1)
def _torch_modules(num_modules: int) -> int:
    """How many modules of torch.distributed are imported; counted anew when the number of all modules has changed."""
    return sum(name.startswith("torch.distributed.") for name in sys.modules)


def _group_count() -> int:
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    # The registry is private, but nothing public counts the subgroups that a test forgot.
    return 0 if c10d is None else len(c10d._world.pg_map)


def _memfd_inodes() -> set[int]:
    maps = Path("/proc/self/maps").read_bytes()
    # Looked for as a whole first: there are thousands of lines, and most often none is of a memory file.
    lines = maps.splitlines() if b"/memfd:" in maps else []
    inodes = {int(line.split()[4]) for line in lines if b"/memfd:" in line}
    for link, target in _open_files("self").items():
        if target.startswith("/memfd:"):
            inodes.add(os.stat(link).st_ino)
    return inodes


def _shm_names_held_by_others() -> set[str]:
    held: set[str] = set()
    for pid in psutil.pids():
        if _is_of_this_run(pid):
            continue
        mapped = [line.split(maxsplit=5)[-1] for line in _lines_of(f"/proc/{pid}/maps")]
        for path in [*mapped, *_open_files(pid).values()]:
            if path.startswith(f"{SHM_DIR}/"):
                held.add(Path(path).name)
    return held


def _is_of_this_run(pid: int) -> bool:
    run = os.environ.get(RUN_VARIABLE, str(os.getpid()))
    if str(pid) == run:
        return True
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{RUN_VARIABLE}={run}".encode() in environment.split(b"\0")


def _open_files(pid: int | str) -> dict[str, str]:
    """What the descriptors of a process lead to, by the path of the descriptor."""
    found: dict[str, str] = {}
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{fd}"
            if os.path.islink(link):
                found[link] = os.readlink(link)
    except OSError:  # the process ended, or a descriptor was closed while we looked
        pass
    return found


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _thread_lines(before: Snapshot, now: Snapshot) -> list[str]:
    new = [name for ident, name in now.threads.items() if ident not in before.threads]
    return [f"threads: {name!r} still runs" for name in new]


def _native_thread_lines(before: Snapshot, now: Snapshot) -> list[str]:
    # Some of torch's modules (torch.distributed.nn.functional) have the default group as a default
    # argument, so the group that lives when they are first imported is kept for good.
    if now.torch_modules > before.torch_modules:
        return []
    grown = sorted((now.native - before.native).items())
    return [f"native_threads: {count} more named {name!r}, serving a live group" for name, count in grown]


def _children_lines(before: Snapshot, now: Snapshot) -> list[str]:
    new = {pid: command for pid, command in now.children.items() if pid not in before.children}
    return [f"children: process {pid} still runs: {command[:120]}" for pid, command in new.items()]


def _group_lines(before: Snapshot, now: Snapshot) -> list[str]:
    count = now.groups - before.groups
    return [f"groups: {count} process group(s) not destroyed"] if count > 0 else []


def _shm_lines(before: Snapshot, now: Snapshot) -> list[str]:
    return shm_leaks(before.shm_names)


def _memfd_lines(before: Snapshot, now: Snapshot) -> list[str]:
    count = now.memfds - before.memfds
    return [f"memfd: {count} anonymous memory file(s) still open or mapped"] if count > 0 else []


def _environment_lines(before: Snapshot, now: Snapshot) -> list[str]:
    changed = {name for name, _ in before.environment.items() ^ now.environment.items()}
    lines = []
    for name in sorted(changed - CHANGING_VARIABLES):
        was, now_is = (repr(s.environment[name]) if name in s.environment else "unset" for s in (before, now))
        lines.append(f"environment: {name} was {was}, is {now_is}")
    return lines


_CHECKS: dict[Leak, Callable[[Snapshot, Snapshot], list[str]]] = {
    Leak.THREADS: _thread_lines,
    Leak.NATIVE_THREADS: _native_thread_lines,
    Leak.CHILDREN: _children_lines,
    Leak.GROUPS: _group_lines,
    Leak.SHM: _shm_lines,
    Leak.MEMFD: _memfd_lines,
    Leak.ENVIRONMENT: _environment_lines,
}
