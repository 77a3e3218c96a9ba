"""Which process a rank is, and whether it has ended: seen at once by whoever runs on the same host.

A transport without a watch of its own (gloo) notices a dead rank by a connection that breaks while data is under way. A rank
that waits in the store has none under way, and would wait for the whole time limit. Must not know of groups.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def identity() -> dict[str, Any]:
    """What lets other processes of this host see whether this one lives."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # Containers of one host may have numbers of processes of their own.
        return {"host": f"{boot}/{os.readlink('/proc/self/ns/pid')}", "pid": os.getpid(), "began": began(os.getpid())}
    except OSError:
        return {"host": f"unknown/{os.getpid()}", "pid": os.getpid(), "began": ""}


def began(pid: int) -> str:
    """When a process began, as the kernel counts; "" if there is none. Tells it from a later one of the same number."""
    try:
        # The name, in parentheses, may hold anything; the state follows it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # A zombie has ended; only its parent has not asked yet.
    return "" if fields[0] in "ZX" else fields[19]


def has_ended(process: Mapping[str, Any], host: str) -> bool:
    """Whether the process of an `identity` is known to have ended, to one on `host`. Of another host nothing is known."""
    return process["host"] == host and bool(process["began"]) and began(process["pid"]) != process["began"]


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by a signal (SIGSTOP, Ctrl-Z); not under a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """The process that a process is a child of; 0 if that cannot be seen."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def children_of(pid: int) -> list[int]:
    """The children of a process, zombies too."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    except OSError:
        pass  # it has ended, or is another user's
    return found


def environ_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty if that cannot be seen."""
    try:
        entries = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
